//! Compiles the protocols without a protoc binary.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=worker.proto");
    println!("cargo:rerun-if-changed=engine.proto");
    let compile = |file| protox::compile([file], ["."]);
    // It imports worker.proto, whose messages come from the second run: that overwrites what this one made of them.
    tonic_prost_build::configure().extern_path(".penstock.worker.v1", "crate").compile_fds(compile("engine.proto")?)?;
    tonic_prost_build::configure().compile_fds(compile("worker.proto")?)?;
    Ok(())
}
