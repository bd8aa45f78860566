//! Owns programs that the checks need and may have to fetch: from this machine, else from the packages of its distribution,
//! unpacked under `target/` and not installed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::python::run;

/// A program and the libraries that came with it.
pub(crate) struct Program {
    path: PathBuf,
    libraries: Option<PathBuf>,
}

impl Program {
    /// Finds `name`, or unpacks the package that has it.
    ///
    /// # Errors
    /// What could not be fetched.
    pub(crate) fn find(root: &Path, name: &str, package: &str) -> Result<Self, String> {
        if let Some(path) = installed(name) {
            return Ok(Self { path, libraries: None });
        }
        let folder = root.join("target/packages").join(package);
        if unpacked(&folder, name).is_none() {
            fetch(&folder, package).map_err(|error| format!("{error} (Debian: apt install {package})"))?;
        }
        let path = unpacked(&folder, name).ok_or_else(|| format!("{package} has no {name}"))?;
        let libraries = std::fs::read_dir(folder.join("root/usr/lib"))
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.to_string_lossy().ends_with("-linux-gnu"));
        Ok(Self { path, libraries })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A command that runs it.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        if let Some(libraries) = &self.libraries {
            command.env("LD_LIBRARY_PATH", libraries);
        }
        command
    }
}

/// A program on the path, or where system programs are.
pub(crate) fn installed(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

fn unpacked(folder: &Path, name: &str) -> Option<PathBuf> {
    let root = folder.join("root");
    ["usr/sbin", "usr/bin", "bin"].iter().map(|bin| root.join(bin).join(name)).find(|file| file.is_file())
}

/// Downloads a package with the dependencies that this machine lacks and unpacks them.
fn fetch(folder: &Path, package: &str) -> Result<(), String> {
    let archives = folder.join("archives");
    std::fs::create_dir_all(archives.join("partial"))
        .map_err(|error| format!("{}: {error}", archives.display()))?;
    let mut apt = Command::new("apt-get");
    apt.args(["install", "--download-only", "--no-install-recommends", "--yes", "--quiet=2"])
        // Nothing of the system is changed, so its lock is not needed and nor are its rights.
        .args(["-o", "Debug::NoLocking=1", "-o"])
        .arg(format!("Dir::Cache::archives={}", archives.display()))
        .arg(package)
        .stdout(Stdio::null());
    run(&mut apt, "apt-get install --download-only")?;
    let files = std::fs::read_dir(&archives).map_err(|error| format!("{}: {error}", archives.display()))?;
    for file in files.flatten().map(|entry| entry.path()) {
        if file.extension().is_some_and(|extension| extension == "deb") {
            let mut dpkg = Command::new("dpkg-deb");
            dpkg.arg("--extract").arg(&file).arg(folder.join("root"));
            run(&mut dpkg, "dpkg-deb --extract")?;
        }
    }
    Ok(())
}
