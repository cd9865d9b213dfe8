//! The chat renderer alone, for the router's own tests. The `penstock` binary has it built in.

fn main() -> std::io::Result<()> {
    penstock_router::text::run_chat_renderer()
}
