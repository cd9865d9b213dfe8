//! Finds the folders of `--lora-adapters`: in the file system, or in the cache of Hub models. Nothing is downloaded.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use penstock_router::config::{AdapterConfig, AdapterSource};

use crate::args::Args;

/// The file that makes a folder an adapter.
const CONFIG: &str = "adapter_config.json";

/// Why a value of `--lora-adapters` cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AdapterFlagError {
    #[error("--lora-adapters has {given:?}, must be NAME=FOLDER, FOLDER, or the id of an adapter in the Hub cache")]
    Malformed { given: String },
    #[error("--lora-adapters: {} is not an adapter: it has no {CONFIG}", .folder.display())]
    NotAnAdapter { folder: PathBuf },
    #[error(
        "--lora-adapters: {id} is neither a folder nor in the Hub cache {}; download it with `hf download {id}`",
        .cache.display()
    )]
    NotCached { id: String, cache: PathBuf },
    #[error("--lora-adapters has two adapters with the name {0:?}; give one of them another: NAME=FOLDER")]
    TwoOfOneName(String),
}

/// The adapters to serve. `hub_cache`: the folder of Hub models.
pub(crate) fn config(args: &Args, hub_cache: &Path) -> Result<AdapterConfig, AdapterFlagError> {
    let given = args.lora_adapters.iter().map(|given| given.trim()).filter(|given| !given.is_empty());
    let sources = given.map(|given| source(given, hub_cache)).collect::<Result<Vec<_>, _>>()?;
    let mut names = HashSet::new();
    if let Some(twice) = sources.iter().find(|source| !names.insert(&source.name)) {
        return Err(AdapterFlagError::TwoOfOneName(twice.name.clone()));
    }
    let max_slots = args.max_lora_slots as usize;
    let max_loaded = if args.enable_lora_updates { max_slots } else { sources.len().min(max_slots) };
    Ok(AdapterConfig { sources, max_loaded, can_change: args.enable_lora_updates })
}

/// COMPAT: TGI's syntax, `id`, `id@revision`, `name=/path` and `name=/path@revision`. A folder has no revisions, so there the
/// part behind `@` is part of the path.
fn source(given: &str, hub_cache: &Path) -> Result<AdapterSource, AdapterFlagError> {
    let (name, place) = given.split_once('=').unwrap_or((given, given));
    if name.is_empty() || place.is_empty() {
        return Err(AdapterFlagError::Malformed { given: given.to_owned() });
    }
    let folder = Path::new(place);
    let path = match std::fs::canonicalize(folder) {
        Ok(path) => path,
        Err(_) if given.contains('=') => {
            return Err(AdapterFlagError::NotAnAdapter { folder: folder.to_owned() });
        }
        Err(_) => cached(place, hub_cache)?,
    };
    if !path.join(CONFIG).is_file() {
        return Err(AdapterFlagError::NotAnAdapter { folder: path });
    }
    let name = if given.contains('=') { name } else { name.split_once('@').map_or(name, |(id, _)| id) };
    Ok(AdapterSource { name: name.to_owned(), path })
}

/// The folder of a Hub repository, given as `owner/name` or `owner/name@revision`, in the cache.
fn cached(given: &str, hub_cache: &Path) -> Result<PathBuf, AdapterFlagError> {
    let (id, revision) = given.split_once('@').unwrap_or((given, "main"));
    let is_id = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains(['/', '\\']);
    let parts: Vec<&str> = id.split('/').collect();
    if parts.len() > 2 || !parts.iter().all(|part| is_id(part)) || !is_id(revision) {
        return Err(AdapterFlagError::Malformed { given: given.to_owned() });
    }
    let folder = hub_cache.join(format!("models--{}", parts.join("--")));
    let commit = std::fs::read_to_string(folder.join("refs").join(revision));
    let snapshot = folder.join("snapshots").join(commit.as_deref().map_or(revision, str::trim));
    let not_cached = |_| AdapterFlagError::NotCached { id: id.to_owned(), cache: hub_cache.to_owned() };
    std::fs::canonicalize(snapshot).map_err(not_cached)
}

/// Where the Hugging Face libraries keep Hub models.
pub(crate) fn hub_cache(args: &Args, get_env: impl Fn(&str) -> Option<String>) -> PathBuf {
    let home = || get_env("HOME").map_or_else(PathBuf::new, PathBuf::from);
    let hf_home = || get_env("HF_HOME").map_or_else(|| home().join(".cache/huggingface"), PathBuf::from);
    let of_env = || get_env("HF_HUB_CACHE").map(PathBuf::from);
    args.huggingface_hub_cache.clone().or_else(of_env).unwrap_or_else(|| hf_home().join("hub"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn adapter_in(folder: PathBuf) -> PathBuf {
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(CONFIG), "{}").unwrap();
        std::fs::canonicalize(folder).unwrap()
    }

    fn read(value: &str, cache: &Path) -> Result<AdapterConfig, AdapterFlagError> {
        config(&Args::parse_from(["penstock", "--lora-adapters", value]), cache)
    }

    #[test]
    fn adapters_are_named_folders_or_ids_in_the_cache() {
        let root = tempfile::tempdir().unwrap();
        let folder = adapter_in(root.path().join("some@folder"));
        let cache = root.path().join("cache");
        let repository = cache.join("models--owner--name");
        let main = adapter_in(repository.join("snapshots/abc"));
        let other = adapter_in(repository.join("snapshots/def"));
        std::fs::create_dir_all(repository.join("refs")).unwrap();
        std::fs::write(repository.join("refs/main"), "abc").unwrap();
        let given = format!("sql={}, owner/name,{}", folder.display(), folder.display());
        let config = read(&given, &cache).unwrap();
        let found: Vec<_> = config.sources.iter().map(|source| (source.name.as_str(), &source.path)).collect();
        let typed = folder.display().to_string();
        // A folder's name may contain what separates a revision.
        let typed = typed.split_once('@').map_or(typed.as_str(), |(name, _)| name).to_owned();
        assert_eq!(found, [("sql", &folder), ("owner/name", &main), (typed.as_str(), &folder)]);
        assert_eq!(config.max_loaded, 3);
        assert_eq!(read("owner/name@def", &cache).unwrap().sources[0].path, other);
    }

    #[test]
    fn what_is_not_an_adapter_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let folder = adapter_in(root.path().join("a"));
        let plain = root.path().join("plain");
        std::fs::create_dir(&plain).unwrap();
        let refused = |value: &str| read(value, root.path()).unwrap_err().to_string();
        assert!(refused(&format!("x={}", plain.display())).contains("has no adapter_config.json"));
        assert!(refused("x=/nowhere").contains("/nowhere is not an adapter"));
        assert!(refused("owner/name").contains("neither a folder nor in the Hub cache"));
        for malformed in ["=/a", "a=", "../../etc", "a/b/c", "owner/name@../x"] {
            assert!(refused(malformed).contains("must be NAME=FOLDER"), "{malformed}");
        }
        let twice = format!("x={0},x={0}", folder.display());
        assert!(refused(&twice).contains("two adapters with the name \"x\""));
    }

    #[test]
    fn without_adapters_none_are_loaded() {
        let args = Args::parse_from(["penstock"]);
        assert_eq!(config(&args, Path::new("/nowhere")), Ok(AdapterConfig::default()));
    }

    #[test]
    fn the_cache_is_where_the_libraries_have_it() {
        let env = |name: &str| match name {
            "HOME" => Some("/home/me".to_owned()),
            _ => None,
        };
        let args = Args::parse_from(["penstock"]);
        assert_eq!(hub_cache(&args, env), Path::new("/home/me/.cache/huggingface/hub"));
        let in_home = |name: &str| (name == "HF_HOME").then(|| "/hf".to_owned());
        assert_eq!(hub_cache(&args, in_home), Path::new("/hf/hub"));
        let given = Args::parse_from(["penstock", "--huggingface-hub-cache", "/given"]);
        assert_eq!(hub_cache(&given, env), Path::new("/given"));
    }
}
