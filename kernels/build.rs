//! Sets `cfg(avx512_bf16)` and `cfg(amx_bf16)` if the building machine has the kernels' instructions. Otherwise their tests are
//! reported as ignored.

#[path = "src/cpu.rs"]
mod cpu;

fn main() {
    println!("cargo::rerun-if-changed=src/cpu.rs");
    println!("cargo::rustc-check-cfg=cfg(avx512_bf16, amx_bf16)");
    if cpu::supported() {
        println!("cargo::rustc-cfg=avx512_bf16");
    }
    if cpu::Amx::request().is_some() {
        println!("cargo::rustc-cfg=amx_bf16");
    }
}
