//! Logging: one line per event on stdout, as compact text or JSON. `LOG_LEVEL` sets the level.
//!
//! INVARIANT: logging never waits for the log's reader. A separate thread writes. Lines that it cannot write (because the
//! reader is slow or gone, or the disk is full) are lost, counted, and reported once writing works again.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing_subscriber::EnvFilter;

/// Buffer for a slow reader: several thousand lines.
const MAX_BUFFERED_BYTES: usize = 1 << 20;
/// Time limit for the last lines at exit.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Starts logging. `level` is the value of `LOG_LEVEL`: a plain level for this server's own events, or a filter of
/// tracing-subscriber. Dropping the result flushes the log.
pub(crate) fn start(json: bool, level: Option<&str>) -> io::Result<Flush> {
    let lines = Lines::default();
    let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let writer = lines.clone();
    std::thread::Builder::new().name("log".to_owned()).spawn(move || writer.write_to(stdout))?;
    let flush = Flush(lines.clone());
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter(level)).with_writer(move || lines.clone());
    if json {
        subscriber.json().flatten_event(false).with_current_span(false).with_span_list(false).init();
    } else {
        subscriber.compact().with_ansi(io::stdout().is_terminal()).with_target(false).init();
    }
    Ok(flush)
}

fn filter(level: Option<&str>) -> EnvFilter {
    let level = level.filter(|level| !level.is_empty()).unwrap_or("info").to_lowercase();
    if ["trace", "debug", "info", "warn", "error", "off"].contains(&level.as_str()) {
        return EnvFilter::new(format!("warn,penstock={level},penstock_router={level},worker={level}"));
    }
    EnvFilter::new(level)
}

/// Waits on drop until buffered lines are written, at most `FLUSH_TIMEOUT`.
pub(crate) struct Flush(Lines);

impl Drop for Flush {
    fn drop(&mut self) {
        let has_more = |buffer: &mut Buffer| !buffer.bytes.is_empty() || buffer.is_writing;
        let _ = self.0.shared.changed.wait_timeout_while(self.0.lock(), FLUSH_TIMEOUT, has_more);
    }
}

/// Lines on their way to stdout. Clones share one buffer.
#[derive(Clone, Default)]
struct Lines {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    buffer: Mutex<Buffer>,
    changed: Condvar,
}

#[derive(Default)]
struct Buffer {
    bytes: Vec<u8>,
    is_writing: bool,
    /// Lines lost since the start.
    num_lost: u64,
}

impl Lines {
    fn lock(&self) -> MutexGuard<'_, Buffer> {
        self.shared.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never returns.
    fn write_to(self, mut output: impl Write) {
        let mut num_reported = 0;
        loop {
            let buffer = self.shared.changed.wait_while(self.lock(), |buffer| buffer.bytes.is_empty());
            let mut buffer = buffer.unwrap_or_else(PoisonError::into_inner);
            let bytes = std::mem::take(&mut buffer.bytes);
            buffer.is_writing = true;
            drop(buffer);
            let num_lost = write_lines(&mut output, &bytes);
            let mut buffer = self.lock();
            buffer.is_writing = false;
            buffer.num_lost += num_lost;
            let total = buffer.num_lost;
            drop(buffer);
            self.shared.changed.notify_all();
            if num_lost == 0 && total > num_reported {
                num_reported = total;
                tracing::warn!(lines = total, "log lines were lost since startup because stdout could not be written");
            }
        }
    }
}

/// Writes whole lines. Returns how many were lost; the first lost line may have been written in part.
fn write_lines(output: &mut impl Write, mut bytes: &[u8]) -> u64 {
    while !bytes.is_empty() {
        match output.write(bytes) {
            Ok(count @ 1..) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => return bytes.iter().filter(|&&byte| byte == b'\n').count() as u64,
        }
    }
    0
}

impl Write for Lines {
    /// `line` is one event's line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut buffer = self.lock();
        if buffer.bytes.len() + line.len() > MAX_BUFFERED_BYTES {
            buffer.num_lost += 1;
        } else {
            buffer.bytes.extend_from_slice(line);
            self.shared.changed.notify_all();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_plain_level_applies_to_our_own_events() {
        let filter = filter(Some("DEBUG")).to_string();
        assert!(filter.contains("penstock=debug") && filter.contains("warn"), "{filter}");
    }

    #[test]
    fn a_filter_is_used_unchanged() {
        assert_eq!(filter(Some("hyper=trace")).to_string(), "hyper=trace");
    }

    /// A reader that waits for permission before each read, and passes on what it reads.
    struct Reader {
        may_read: mpsc::Receiver<()>,
        read: mpsc::Sender<Vec<u8>>,
    }

    impl Write for Reader {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.may_read.recv().map_err(|_| ErrorKind::BrokenPipe)?;
            self.read.send(bytes.to_vec()).map_err(|_| ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn logging_never_waits_for_a_slow_reader_and_lost_lines_are_counted() {
        let (allow, may_read) = mpsc::channel();
        let (sender, read) = mpsc::channel();
        let mut lines = Lines::default();
        let writer = lines.clone();
        std::thread::spawn(move || writer.write_to(Reader { may_read, read: sender }));
        let line = [b'a'; 1023].into_iter().chain([b'\n']).collect::<Vec<_>>();
        for _ in 0..5000 {
            lines.write_all(&line).unwrap();
        }
        let num_lost = lines.lock().num_lost;
        assert!((5000 - 2 * 1024..=5000 - 1024).contains(&num_lost), "{num_lost}");
        let mut num_read = 0;
        while num_read < 5000 - num_lost {
            allow.send(()).unwrap();
            num_read += read.recv().unwrap().len() as u64 / 1024;
        }
        assert_eq!(num_read + num_lost, 5000);
    }

    #[test]
    fn lines_for_a_full_disk_are_counted_as_lost() {
        let mut full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        assert_eq!(write_lines(&mut full, b"one\ntwo\n"), 2);
        assert_eq!(write_lines(&mut Vec::new(), b"one\ntwo\n"), 0);
    }
}
