//! Owns the atomic write of a directory: everything goes to a `.partial` sibling that is renamed when it is complete.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{ArtifactError, Result};
use crate::manifest::FileRecord;

const LOCK: &str = ".lock";

/// A directory being written. Dropped without [`Staging::finish`], it removes what it wrote.
#[derive(Debug)]
pub(crate) struct Staging {
    out: PathBuf,
    partial: PathBuf,
    lock: Option<File>,
}

impl Staging {
    /// Starts writing `out`. What a killed run left behind is removed; a run that is still going is respected.
    ///
    /// # Errors
    /// [`ArtifactError::Exists`] when `out` is there, [`ArtifactError::FileSet`] when another process is writing it.
    pub(crate) fn begin(out: &Path) -> Result<Self> {
        if fs::symlink_metadata(out).is_ok() {
            return Err(ArtifactError::Exists { path: out.to_owned() });
        }
        let name = out.file_name().ok_or_else(|| ArtifactError::FileSet {
            path: out.to_owned(),
            reason: "has no directory name".to_owned(),
            action: "name the directory to create".to_owned(),
        })?;
        let mut partial_name = name.to_owned();
        partial_name.push(".partial");
        let partial = out.with_file_name(partial_name);
        if let Some(parent) = parent(out) {
            fs::create_dir_all(parent).map_err(ArtifactError::io(parent, "create"))?;
        }
        if fs::symlink_metadata(&partial).is_ok_and(|found| !found.is_dir()) {
            return Err(ArtifactError::Exists { path: partial });
        }
        fs::create_dir_all(&partial).map_err(ArtifactError::io(&partial, "create"))?;
        let lock_path = partial.join(LOCK);
        let lock = File::create(&lock_path).map_err(ArtifactError::io(&lock_path, "create"))?;
        if lock.try_lock().is_err() {
            return Err(ArtifactError::FileSet {
                path: partial,
                reason: "is being written by another process".to_owned(),
                action: "wait for it or choose another directory".to_owned(),
            });
        }
        let staging = Self { out: out.to_owned(), partial, lock: Some(lock) };
        for entry in fs::read_dir(&staging.partial).map_err(ArtifactError::io(&staging.partial, "read"))? {
            let path = entry.map_err(ArtifactError::io(&staging.partial, "read"))?.path();
            if path.file_name().is_some_and(|name| name == LOCK) {
                continue;
            }
            let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(ArtifactError::io(path, "remove"))?;
        }
        Ok(staging)
    }

    /// Path of a file inside the directory being written.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.partial.join(name)
    }

    /// Creates a file inside the directory, `name` may hold one folder.
    pub(crate) fn create(&self, name: &str) -> Result<HashedFile> {
        let path = self.path(name);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(ArtifactError::io(folder, "create"))?;
        }
        let file = File::create_new(&path).map_err(ArtifactError::io(&path, "create"))?;
        Ok(HashedFile {
            path,
            writer: BufWriter::with_capacity(1 << 20, file),
            hasher: Sha256::new(),
            size: 0,
        })
    }

    /// Writes a whole small file.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<FileRecord> {
        let mut file = self.create(name)?;
        file.write(bytes)?;
        file.finish()
    }

    /// Makes the directory appear under its name, durable and complete.
    pub(crate) fn finish(mut self) -> Result<()> {
        let lock_path = self.path(LOCK);
        fs::remove_file(&lock_path).map_err(ArtifactError::io(lock_path, "remove"))?;
        sync_dir(&self.partial)?;
        if fs::symlink_metadata(&self.out).is_ok() {
            return Err(ArtifactError::Exists { path: self.out.clone() });
        }
        fs::rename(&self.partial, &self.out).map_err(ArtifactError::io(&self.out, "rename to"))?;
        self.lock = None;
        sync_dir(parent(&self.out).unwrap_or(Path::new(".")))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.lock.is_some() {
            // Best effort: what cannot be removed now is removed by the next run.
            let _ = fs::remove_dir_all(&self.partial);
        }
    }
}

fn parent(path: &Path) -> Option<&Path> {
    path.parent().filter(|parent| !parent.as_os_str().is_empty())
}

fn sync_dir(path: &Path) -> Result<()> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(ArtifactError::io(path, "sync"))
}

/// A file that is hashed while it is written.
pub(crate) struct HashedFile {
    path: PathBuf,
    writer: BufWriter<File>,
    hasher: Sha256,
    size: u64,
}

impl HashedFile {
    /// Appends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.writer.write_all(bytes).map_err(ArtifactError::io(&self.path, "write"))?;
        self.hasher.update(bytes);
        self.size += bytes.len() as u64;
        Ok(())
    }

    /// Flushes to the disk and returns size and digest.
    pub(crate) fn finish(self) -> Result<FileRecord> {
        let file = self
            .writer
            .into_inner()
            .map_err(|error| ArtifactError::io(&self.path, "write")(error.into_error()))?;
        file.sync_all().map_err(ArtifactError::io(&self.path, "sync"))?;
        Ok(FileRecord { size: self.size, sha256: hex::encode(self.hasher.finalize()) })
    }
}
