//! The allocator of the process (docs/adr/streams-and-connections.md): it frees blocks of other threads without a lock, and returns
//! unused pages by itself.

use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;
