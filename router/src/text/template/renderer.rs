//! The process that renders one chat template, seen from inside: its limits, and the loop that answers the server.

use std::fs;
use std::io::{self, BufReader};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::{SysconfVar, alarm, sysconf};

use super::compiled::Compiled;
use super::process::{
    MAX_MEMORY_BYTES, MAX_PROMPT_BYTES, RENDER_DEADLINE, START_DEADLINE, Start, Started, receive, send,
};
use super::{ChatInputs, TemplateError};

/// Renders a chat template for the server on the other end of standard input, which is a Unix socket, until the server
/// closes it. Call this where the program's first argument is [`RENDERER_ARGUMENT`](super::RENDERER_ARGUMENT).
pub fn run_chat_renderer() -> io::Result<()> {
    limit_memory()?;
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut requests = BufReader::new(socket.try_clone()?);
    let Some(Start { source, special_tokens }) = receive(&mut requests)? else { return Ok(()) };
    let template = within(START_DEADLINE, || Compiled::new(&source, special_tokens, jiff::Zoned::now));
    send(&socket, &template.as_ref().map(|template| Started { uses_tools: template.uses_tools() }))?;
    let Ok(template) = template else { return Ok(()) };
    while let Some(inputs) = receive::<ChatInputs>(&mut requests)? {
        let prompt = within(RENDER_DEADLINE, || template.render_adapted(inputs));
        send(&socket, &prompt.and_then(refuse_too_long))?;
    }
    Ok(())
}

/// Failed allocations end this process from here on.
fn limit_memory() -> io::Result<()> {
    let mapped_pages = fs::read_to_string("/proc/self/statm")?;
    let mapped_pages: u64 = mapped_pages.split(' ').next().and_then(|pages| pages.parse().ok()).unwrap_or(0);
    let page_bytes = sysconf(SysconfVar::PAGE_SIZE)?.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(4096);
    let limit = mapped_pages * page_bytes + MAX_MEMORY_BYTES;
    setrlimit(Resource::RLIMIT_AS, limit, limit)?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    Ok(())
}

/// The server ends this process at the deadline. The alarm does so if the server has died.
fn within<T>(deadline: Duration, work: impl FnOnce() -> T) -> T {
    alarm::set(u32::try_from(deadline.as_secs()).unwrap_or(u32::MAX).saturating_add(1));
    let result = work();
    alarm::cancel();
    result
}

fn refuse_too_long(prompt: String) -> Result<String, TemplateError> {
    if prompt.len() > MAX_PROMPT_BYTES { Err(TemplateError::TooLong) } else { Ok(prompt) }
}
