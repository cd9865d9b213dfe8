//! Logging: one line per event on stdout, compact text or JSON; `LOG_LEVEL` says how much.
//!
//! INVARIANT: nobody who logs waits for whoever reads the log. A thread of its own writes; what it cannot write (a reader that
//! is slow or gone, a full disk) is lost, counted, and said when writing works again.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing_subscriber::EnvFilter;

/// What waits for a slow reader: some thousand lines.
const MAX_WAITING_BYTES: usize = 1 << 20;
/// How long the last lines may take at the end.
const FLUSH_PATIENCE: Duration = Duration::from_secs(1);

/// `level`: the value of `LOG_LEVEL`. A plain level means ours; anything longer is a tracing filter. Dropping the answer
/// waits a moment for what is not written yet.
pub fn start(json: bool, level: Option<&str>) -> io::Result<Flush> {
    let lines = Lines::default();
    let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let writing = lines.clone();
    std::thread::Builder::new().name("log".to_owned()).spawn(move || writing.write_to(stdout))?;
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

/// Writes what is left when it is dropped, if that does not take long.
pub struct Flush(Lines);

impl Drop for Flush {
    fn drop(&mut self) {
        let has_more = |waiting: &mut Waiting| !waiting.bytes.is_empty() || waiting.is_writing;
        let _ = self.0.shared.changed.wait_timeout_while(self.0.lock(), FLUSH_PATIENCE, has_more);
    }
}

/// Lines on their way to stdout. Clones share them.
#[derive(Clone, Default)]
struct Lines {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    bytes: Vec<u8>,
    is_writing: bool,
    /// Since the start.
    num_lost: u64,
}

impl Lines {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never returns.
    fn write_to(self, mut output: impl Write) {
        let mut num_reported = 0;
        loop {
            let waiting = self.lock();
            let waiting = self.shared.changed.wait_while(waiting, |waiting| waiting.bytes.is_empty());
            let mut waiting = waiting.unwrap_or_else(PoisonError::into_inner);
            let bytes = std::mem::take(&mut waiting.bytes);
            waiting.is_writing = true;
            drop(waiting);
            let num_lost = write_lines(&mut output, &bytes);
            let mut waiting = self.lock();
            waiting.is_writing = false;
            waiting.num_lost += num_lost;
            let total = waiting.num_lost;
            drop(waiting);
            self.shared.changed.notify_all();
            if num_lost == 0 && total > num_reported {
                num_reported = total;
                tracing::warn!(lines = total, "log lines were lost since the start: they could not be written");
            }
        }
    }
}

/// How many lines could not be written, the first of them perhaps in part.
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
    /// One event's line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut waiting = self.lock();
        if waiting.bytes.len() + line.len() > MAX_WAITING_BYTES {
            waiting.num_lost += 1;
        } else {
            waiting.bytes.extend_from_slice(line);
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
    fn a_plain_level_means_our_own_events() {
        let filter = filter(Some("DEBUG")).to_string();
        assert!(filter.contains("penstock=debug") && filter.contains("warn"), "{filter}");
    }

    #[test]
    fn a_filter_is_taken_as_it_is() {
        assert_eq!(filter(Some("hyper=trace")).to_string(), "hyper=trace");
    }

    /// A reader that takes nothing before it is told to, and then hands on what it gets.
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
    fn who_logs_does_not_wait_for_who_reads_and_what_is_too_much_is_counted() {
        let (allow, may_read) = mpsc::channel();
        let (sender, read) = mpsc::channel();
        let mut lines = Lines::default();
        let writing = lines.clone();
        std::thread::spawn(move || writing.write_to(Reader { may_read, read: sender }));
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
    fn a_full_disk_loses_lines_and_nothing_else() {
        let mut full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        assert_eq!(write_lines(&mut full, b"one\ntwo\n"), 2);
        assert_eq!(write_lines(&mut Vec::new(), b"one\ntwo\n"), 0);
    }
}
