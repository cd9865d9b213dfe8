//! Reads the weights into the page cache while Python does its imports.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use crate::process::memory;

/// The kernel reads no more than this ahead for one call.
const PIECE_BYTES: u64 = 1 << 20;

/// Returns immediately. Errors are ignored: the workers meet them when they read the weights.
pub(crate) fn begin(weights: Vec<PathBuf>) {
    let Ok(num_bytes) = weights.iter().map(|path| Ok(std::fs::metadata(path)?.len())).sum::<io::Result<u64>>() else {
        return;
    };
    // With less memory, the last pages read would evict the first ones needed.
    if memory::available_bytes().is_some_and(|available| num_bytes <= available / 2) {
        std::thread::spawn(move || weights.iter().try_for_each(|path| read_ahead(path)));
    }
}

fn read_ahead(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    for start in (0..file.metadata()?.len()).step_by(PIECE_BYTES as usize) {
        posix_fadvise(&file, start as i64, PIECE_BYTES as i64, PosixFadviseAdvice::POSIX_FADV_WILLNEED)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_ahead_to_its_end_and_a_missing_one_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, vec![0; PIECE_BYTES as usize + 1]).unwrap();
        read_ahead(&path).unwrap();
        assert_eq!(read_ahead(&folder.path().join("other")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
