//! Owns the memory maps: the one file of this crate with unsafe code. Knows bytes, not formats.
#![allow(unsafe_code)] // A memory map is only as immutable as the file behind it; the reason stands at the block.

use std::fs::File;
use std::path::Path;

use bytes::Bytes;
use memmap2::Mmap;

use crate::error::{ArtifactError, Result};

/// Maps a regular file read-only. An empty file gives empty bytes.
///
/// # Errors
/// [`ArtifactError::FileSet`] for anything but a regular file (a link is not followed), [`ArtifactError::Io`] otherwise.
pub(crate) fn map_file(path: &Path) -> Result<Bytes> {
    regular(path)?;
    let file = File::open(path).map_err(ArtifactError::io(path, "open"))?;
    if file.metadata().map_err(ArtifactError::io(path, "read"))?.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the map is read-only and private to this process's view. Another process that truncates or rewrites the
    // file could change what we read; an export is never modified in place (writers rename whole directories), and
    // every byte that decides anything is copied out or hashed by the load contract.
    let map = unsafe { Mmap::map(&file) }.map_err(ArtifactError::io(path, "map"))?;
    Ok(Bytes::from_owner(map))
}

/// Refuses everything that is not a regular file, without opening it: opening a FIFO would wait for a writer.
pub(crate) fn regular(path: &Path) -> Result<u64> {
    let metadata = std::fs::symlink_metadata(path).map_err(ArtifactError::io(path, "read"))?;
    if metadata.file_type().is_file() {
        return Ok(metadata.len());
    }
    let found = if metadata.file_type().is_symlink() {
        "a symbolic link"
    } else if metadata.is_dir() {
        "a directory"
    } else {
        "a special file"
    };
    Err(ArtifactError::FileSet {
        path: path.to_owned(),
        reason: format!("is {found}, expected a regular file"),
        action: "put the file itself there".to_owned(),
    })
}
