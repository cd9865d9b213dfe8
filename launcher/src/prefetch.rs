//! Weights on their way from the disk into the page cache while Python does its imports.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use crate::memory;

/// What the kernel begins to read for one call; of more it forgets the rest.
const PIECE_BYTES: u64 = 1 << 20;

/// Returns at once. Whatever does not work here is left to those who read the weights.
pub fn begin(weights: Vec<PathBuf>) {
    let Ok(num_bytes) = weights.iter().map(|path| Ok(std::fs::metadata(path)?.len())).sum::<io::Result<u64>>() else {
        return;
    };
    // With less, what is read last would push out what is needed first.
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
    fn a_file_is_asked_for_to_its_end_and_one_that_is_not_there_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, vec![0; PIECE_BYTES as usize + 1]).unwrap();
        read_ahead(&path).unwrap();
        assert_eq!(read_ahead(&folder.path().join("other")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
