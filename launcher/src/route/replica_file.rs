//! `--replica-file`: the servers of a router, one URL a line, read again while it serves.
//!
//! The content is compared each second. That also sees what a watch of the file would miss: Kubernetes replaces a ConfigMap by a link to
//! another folder, and network file systems report nothing.

use std::convert::Infallible;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use penstock_router::engine::RemoteOptions;
use penstock_router::remote::{Access, Remote};
use penstock_router::replica::Replicas;

const INTERVAL: Duration = Duration::from_secs(1);
/// Ample for 1024 URLs with comments.
const MAX_BYTES: u64 = 1 << 20;

/// The servers of a file.
pub(crate) struct Servers {
    pub(crate) remotes: Vec<Remote>,
    /// Errors of the other lines.
    pub(crate) refusals: Vec<String>,
}

/// Follows the file while the router serves.
pub(crate) struct Follower {
    pub(crate) path: PathBuf,
    pub(crate) access: Access,
    /// Options of each server; `remote` is replaced.
    pub(crate) options: RemoteOptions,
    pub(crate) replicas: Replicas,
}

/// The content of the file.
pub(crate) fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    match text.len() as u64 <= MAX_BYTES {
        true => Ok(text),
        false => Err(io::Error::other(format!("it has more than {MAX_BYTES} bytes"))),
    }
}

/// A line is a URL, a comment after `#`, or empty. A line that cannot be used is refused alone.
pub(crate) fn parse(text: &str, access: &Access) -> Servers {
    let mut servers = Servers { remotes: Vec::new(), refusals: Vec::new() };
    let urls = text.lines().enumerate().map(|(index, line)| (index + 1, line.split('#').next().unwrap_or("").trim()));
    for (number, url) in urls.filter(|(_, url)| !url.is_empty()) {
        let refusal = match Remote::new(url, access) {
            _ if servers.remotes.len() >= Replicas::MAX_ENGINES => {
                format!("at most {} servers are allowed", Replicas::MAX_ENGINES)
            }
            Ok(remote) if servers.remotes.iter().any(|other| other.url() == remote.url()) => {
                "it is there twice".to_owned()
            }
            Ok(remote) => {
                servers.remotes.push(remote);
                continue;
            }
            Err(error) => error.to_string(),
        };
        servers.refusals.push(format!("line {number}, {url:?}: {refusal}"));
    }
    servers
}

impl Follower {
    /// Gives the router the servers of the file whenever they change. A file that cannot be read, or that has no server, changes nothing.
    pub(crate) async fn run(self) -> Infallible {
        let mut applied = Ok(String::new());
        let mut waiting = Vec::new();
        let mut read_before = None;
        loop {
            let path = self.path.clone();
            let text = tokio::task::spawn_blocking(move || read(&path)).await.unwrap_or_else(|error| Err(error.into()));
            let text = text.map_err(|error| error.to_string());
            // A file that is being written in place changes between two reads.
            let is_whole = read_before.as_ref() == Some(&text);
            if is_whole && (text != applied || !waiting.is_empty()) {
                waiting = self.apply(&text, text != applied);
                applied.clone_from(&text);
            }
            read_before = Some(text);
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Returns the servers that wait until others have left. `is_new`: the content was not reported yet.
    fn apply(&self, text: &Result<String, String>, is_new: bool) -> Vec<String> {
        let path = self.path.display();
        let warn = |reason: &str| {
            if is_new {
                tracing::warn!("--replica-file {path}: {reason}");
            }
        };
        let servers = match text {
            Ok(text) => parse(text, &self.access),
            Err(error) => {
                warn(&format!("cannot read it: {error}; the servers stay as they are"));
                return Vec::new();
            }
        };
        servers.refusals.iter().for_each(|refusal| warn(refusal));
        if servers.remotes.is_empty() {
            warn("it has no server; the servers stay as they are");
            return Vec::new();
        }
        let options = |remote| RemoteOptions { remote, ..self.options.clone() };
        let waiting = self.replicas.set_servers(&servers.remotes.into_iter().map(options).collect::<Vec<_>>());
        waiting.iter().for_each(|url| warn(&format!("{url} is used as soon as another server has left")));
        waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access() -> Access {
        Access { secret: "0123456789abcdef".to_owned(), ..Access::default() }
    }

    #[test]
    fn lines_are_urls_comments_or_empty_and_a_bad_one_is_refused_alone() {
        let text = "# two servers\nhttp://127.0.0.1:1\n\nhttp://10.0.0.1:1\n http://127.0.0.1:2 # the second\nHTTP://127.0.0.1:1/\nx\n";
        let servers = parse(text, &access());
        assert_eq!(
            servers.remotes.iter().map(Remote::url).collect::<Vec<_>>(),
            ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        );
        let [plain, twice, no_url] = &servers.refusals[..] else { panic!("{:?}", servers.refusals) };
        assert!(plain.starts_with("line 4, \"http://10.0.0.1:1\": ") && plain.contains("without TLS"), "{plain}");
        assert_eq!(twice, "line 6, \"HTTP://127.0.0.1:1/\": it is there twice");
        assert!(no_url.starts_with("line 7, \"x\": "), "{no_url}");
    }

    #[test]
    fn the_number_of_servers_and_the_size_of_the_file_are_bounded() {
        let text: String = (1..=1026).map(|port| format!("http://127.0.0.1:{port}\n")).collect();
        let servers = parse(&text, &access());
        assert_eq!(servers.remotes.len(), 1024);
        assert_eq!(servers.refusals[1], "line 1026, \"http://127.0.0.1:1026\": at most 1024 servers are allowed");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![b'#'; 1 + MAX_BYTES as usize]).unwrap();
        assert!(read(file.path()).unwrap_err().to_string().contains("more than 1048576 bytes"));
    }
}
