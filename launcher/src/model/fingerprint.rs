//! Properties that decide the bits of a token on this server. A router joins only servers whose properties are equal.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use penstock_router::remote::Properties;
use penstock_router::worker::Description;
use sha2::{Digest, Sha256};

use crate::flag::args::Args;
use crate::flag::quantize::Quantize;

/// Bytes at the begin and at the end of each weight file that are hashed, with its length: reading all of it would take minutes.
const SAMPLE_BYTES: u64 = 1 << 16;
/// Features of a CPU that choose other kernels, as /proc/cpuinfo calls them.
const CPU_FEATURES: [&str; 11] = [
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "amx_tile",
    "asimddp",
    "sve",
    "bf16",
    "i8mm",
];

/// The properties that a router compares with its own.
pub(crate) const VERSION: &str = "penstock version";
pub(crate) const TOKENIZER: &str = "tokenizer";

/// `folder` is the folder that is served. `num_shards` ranks share each layer.
pub(crate) fn properties(
    args: &Args,
    model: &Description,
    num_shards: usize,
    folder: &Path,
    weights: &[PathBuf],
) -> io::Result<Properties> {
    let or = |value: Option<String>, default: &str| value.unwrap_or_else(|| default.to_owned());
    let device = model.device.split(':').next().unwrap_or_default();
    let is_cpu = device == "cpu";
    let properties = [
        (VERSION, env!("CARGO_PKG_VERSION").to_owned()),
        ("architecture", model.architecture.clone()),
        ("dtype", model.dtype.clone()),
        ("KV cache dtype", or(args.kv_cache_dtype.name().map(str::to_owned), "auto")),
        ("device", device.to_owned()),
        ("GPU model", model.device_name.clone()),
        ("software", model.libraries.clone()),
        // On CPUs, any number of ranks adds in the order of one.
        ("number of shards", if is_cpu { String::new() } else { num_shards.to_string() }),
        ("attention", model.attention.clone()),
        ("instruction set", if is_cpu { instruction_set(args)? } else { String::new() }),
        ("quantization", or(args.quantize.map(Quantize::name), "that of the checkpoint")),
        ("dequantization", args.dequantize.to_string()),
        ("activation bits", or(args.activation_bits.map(|bits| bits.to_string()), "the default")),
        ("determinism", args.deterministic.to_string()),
        ("watermark gamma", or(args.watermark_gamma.map(|gamma| gamma.to_string()), "the default")),
        ("watermark delta", or(args.watermark_delta.map(|delta| delta.to_string()), "the default")),
        ("model config", file_hash(&folder.join("config.json"))?),
        (TOKENIZER, tokenizer(folder)?),
        ("weights", weights_hash(weights)?),
    ];
    Ok(Properties(properties.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()))
}

/// The value of `TOKENIZER`.
pub(crate) fn tokenizer(folder: &Path) -> io::Result<String> {
    file_hash(&folder.join("tokenizer.json"))
}

/// The given instruction set, or the CPU features by which the workers choose one.
fn instruction_set(args: &Args) -> io::Result<String> {
    if let Some(isa) = args.cpu_isa.name() {
        return Ok(isa.to_owned());
    }
    let cpus = std::fs::read_to_string("/proc/cpuinfo")?;
    // The line is `flags` on x86-64, `Features` on aarch64.
    let is_flags = |line: &&str| line.starts_with("flags") || line.starts_with("Features");
    let flags: Vec<_> = cpus.lines().find(is_flags).unwrap_or("").split_whitespace().collect();
    let found: Vec<_> = CPU_FEATURES.into_iter().filter(|feature| flags.contains(feature)).collect();
    Ok(format!("{} {}", std::env::consts::ARCH, found.join(" ")))
}

fn file_hash(path: &Path) -> io::Result<String> {
    Ok(short(Sha256::new().chain_update(std::fs::read(path)?)))
}

fn weights_hash(weights: &[PathBuf]) -> io::Result<String> {
    let mut files: Vec<_> = weights.iter().collect();
    files.sort_unstable_by_key(|path| path.file_name());
    let mut hash = Sha256::new();
    for path in files {
        let mut file = File::open(path)?;
        let num_bytes = file.metadata()?.len();
        hash.update(path.file_name().unwrap_or_default().as_encoded_bytes());
        hash.update(num_bytes.to_le_bytes());
        for offset in [0, num_bytes.saturating_sub(SAMPLE_BYTES)] {
            file.seek(SeekFrom::Start(offset))?;
            let mut sample = Vec::new();
            (&mut file).take(SAMPLE_BYTES).read_to_end(&mut sample)?;
            hash.update(&sample);
        }
    }
    Ok(short(hash))
}

/// 64 bits tell servers apart, and fit a log line.
fn short(hash: Sha256) -> String {
    hash.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::resolve;

    fn model(device: &str, device_name: &str) -> Description {
        Description { device_name: device_name.to_owned(), ..resolve::tests::model(device) }
    }

    #[test]
    fn servers_on_unlike_gpus_are_told_apart_and_cpus_give_the_same_bits_on_any_number_of_ranks() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["config.json", "tokenizer.json"] {
            std::fs::write(folder.path().join(name), "{}").unwrap();
        }
        let args = Args::try_parse_from(["penstock"]).unwrap();
        let of = |model: &Description, num_shards| properties(&args, model, num_shards, folder.path(), &[]).unwrap();
        let refusal = |one: &Properties, other: &Properties| one.check(other).unwrap_err().to_string();
        let h100 = model("cuda:0", "NVIDIA H100 80GB HBM3");
        let ours = of(&h100, 4);
        assert_eq!(ours.check(&of(&model("cuda:1", "NVIDIA H100 80GB HBM3"), 4)), Ok(()));
        assert_eq!(
            refusal(&ours, &of(&model("cuda:0", "NVIDIA A100-SXM4-80GB"), 2)),
            "it differs: its GPU model is NVIDIA A100-SXM4-80GB, that of the other servers is NVIDIA H100 80GB HBM3; \
             its number of shards is 2, that of the other servers is 4"
        );
        let newer = Description { libraries: "torch 2.10.0".to_owned(), ..h100 };
        assert!(refusal(&ours, &of(&newer, 4)).contains("its software is torch 2.10.0"));
        assert_eq!(of(&model("cpu", ""), 1).check(&of(&model("cpu", ""), 2)), Ok(()));
    }

    #[test]
    fn weights_are_told_apart_by_name_length_and_ends() {
        let folder = tempfile::tempdir().unwrap();
        let hash = |name: &str, content: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            weights_hash(&[path]).unwrap()
        };
        let long = vec![0; 3 * SAMPLE_BYTES as usize];
        let mut other_end = long.clone();
        *other_end.last_mut().unwrap() = 1;
        let hashes = [hash("a", b"1"), hash("b", b"1"), hash("a", b"12"), hash("a", &long), hash("a", &other_end)];
        let mut distinct = hashes.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), hashes.len());
        assert_eq!(hash("a", b"1"), hashes[0]);
    }
}
