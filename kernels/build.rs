//! Sets `cfg(amx_bf16)` if the building machine has AMX with bf16. Otherwise the tests of it are reported as ignored.

#[path = "src/cpu.rs"]
mod cpu;

fn main() {
    println!("cargo::rerun-if-changed=src/cpu.rs");
    println!("cargo::rustc-check-cfg=cfg(amx_bf16)");
    if cpu::Amx::request().is_some() {
        println!("cargo::rustc-cfg=amx_bf16");
    }
}
