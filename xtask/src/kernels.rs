//! Owns `cargo xtask kernels`: every CUDA kernel for every supported GPU, in one file that the worker loads.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::python::{environment, run};

/// The compiler and what it needs, where the system has none.
const PACKAGES: &str = "nvidia-cuda-nvcc==13.0.88\nnvidia-cuda-crt==13.0.88\nnvidia-nvvm==13.0.88\n\
                        nvidia-cuda-runtime==13.0.96\nnvidia-cuda-cccl==13.0.85\n";
/// GPU generations with code of their own.
const ARCHITECTURES: [&str; 6] = ["80", "86", "89", "90a", "100a", "120"];
/// The generation whose intermediate code serves later ones.
const PORTABLE: &str = "120";
/// How every generation is compiled.
const FLAGS: [&str; 3] = ["-std=c++17", "-O3", "-fatbin"];
/// Oldest compiler.
const OLDEST: u32 = 13;

/// Compiles the kernels to `target/kernels/omni-kev.fatbin` for the given generations (all of them if none is given), unless
/// that file was made from the same sources.
///
/// # Errors
/// What the compiler said.
pub(crate) fn build(root: &Path, architectures: &[String]) -> Result<PathBuf, String> {
    let sources = root.join("crates/backend-cuda/kernels");
    let out = root.join("target/kernels/omni-kev.fatbin");
    let key_file = out.with_extension("key");
    let wanted: Vec<&str> = if architectures.is_empty() {
        ARCHITECTURES.to_vec()
    } else {
        architectures.iter().map(|name| name.trim_start_matches("sm_")).collect()
    };
    let nvcc = compiler(root)?;
    let key = format!("{}\n{FLAGS:?} {wanted:?}\n{}", version(&nvcc)?, contents(&sources)?);
    if out.exists() && std::fs::read_to_string(&key_file).is_ok_and(|made| made == key) {
        println!("kernels: {} is up to date", out.display());
        return Ok(out);
    }
    let fail = |error: std::io::Error| format!("{}: {error}", out.display());
    std::fs::create_dir_all(root.join("target/kernels")).map_err(fail)?;
    let partial = out.with_extension("partial");
    let mut command = Command::new(&nvcc);
    command.args(FLAGS).args(["--threads", "2"]);
    for name in &wanted {
        command.arg(format!("-gencode=arch=compute_{name},code=sm_{name}"));
    }
    if wanted.contains(&PORTABLE) {
        command.arg(format!("-gencode=arch=compute_{PORTABLE},code=compute_{PORTABLE}"));
    }
    command.current_dir(&sources).arg("kernels.cu").arg("-o").arg(&partial);
    run(&mut command, "nvcc")?;
    std::fs::rename(&partial, &out).map_err(fail)?;
    std::fs::write(&key_file, key).map_err(fail)?;
    println!("kernels: compiled for sm_{} to {}", wanted.join(", sm_"), out.display());
    Ok(out)
}

/// The compiler that `NVCC` names, else the system's if it is new enough, else one from PyPI.
fn compiler(root: &Path) -> Result<PathBuf, String> {
    if let Some(named) = std::env::var_os("NVCC") {
        return Ok(PathBuf::from(named));
    }
    for name in ["nvcc", "/usr/local/cuda/bin/nvcc"] {
        if version(Path::new(name)).is_ok_and(|text| release(&text) >= Some(OLDEST)) {
            return Ok(PathBuf::from(name));
        }
    }
    let environment = environment(root, "venv-nvcc", PACKAGES)?;
    let library = environment.join("lib");
    let found = std::fs::read_dir(&library)
        .into_iter()
        .flatten()
        .flatten()
        .map(|python| python.path().join("site-packages/nvidia/cu13/bin/nvcc"))
        .find(|nvcc| nvcc.exists());
    found.ok_or_else(|| format!("{}: has no nvidia/cu13/bin/nvcc after its installation", library.display()))
}

fn version(nvcc: &Path) -> Result<String, String> {
    let output = Command::new(nvcc)
        .arg("--version")
        .output()
        .map_err(|error| format!("{}: cannot be run: {error}", nvcc.display()))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The major version in "Cuda compilation tools, release 13.0, V13.0.88".
fn release(text: &str) -> Option<u32> {
    text.split("release ").nth(1)?.split('.').next()?.parse().ok()
}

/// All sources with their names: what the compiled file was made from.
fn contents(dir: &Path) -> Result<String, String> {
    let fail = |error: std::io::Error| format!("{}: {error}", dir.display());
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(dir).map_err(fail)?.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut all = String::new();
    for path in paths {
        all.push_str(&format!("== {}\n", path.file_name().unwrap_or_default().to_string_lossy()));
        all.push_str(&std::fs::read_to_string(&path).map_err(fail)?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compilers_release_is_read() {
        assert_eq!(release("Cuda compilation tools, release 13.0, V13.0.88"), Some(13));
        assert_eq!(release("gcc 12"), None);
    }
}
