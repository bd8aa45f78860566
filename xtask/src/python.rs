//! Owns the virtual environments that the gate makes for itself, under `target/`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest Python that the tools run on.
const OLDEST: (u32, u32) = (3, 10);

/// An environment with the packages of a requirements file; made again when that file changes.
///
/// # Errors
/// What is missing on this machine, or what pip refused.
pub(crate) fn environment(root: &Path, name: &str, requirements: &str) -> Result<PathBuf, String> {
    let dir = root.join("target").join(name);
    let mark = dir.join("omni-kev-requirements.txt");
    if std::fs::read_to_string(&mark).is_ok_and(|made| made == requirements) {
        return Ok(dir);
    }
    let python = python()?;
    // What a broken-off run left behind is no environment.
    if dir.exists() {
        std::fs::remove_dir_all(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    }
    run(
        Command::new(&python).args(["-m", "venv"]).arg(&dir),
        "python -m venv (Debian: apt install python3-venv)",
    )?;
    let list = dir.join("requirements.txt");
    std::fs::write(&list, requirements).map_err(|error| format!("{}: {error}", list.display()))?;
    let mut pip = Command::new(dir.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"]).arg(&list);
    run(&mut pip, "pip install")?;
    std::fs::rename(&list, &mark).map_err(|error| format!("{}: {error}", mark.display()))?;
    Ok(dir)
}

fn python() -> Result<String, String> {
    for name in ["python3", "python"] {
        let code = "import sys; print(sys.version_info[0], sys.version_info[1])";
        let Ok(output) = Command::new(name).args(["-c", code]).output() else { continue };
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut numbers = text.split_whitespace().filter_map(|number| number.parse().ok());
        if let (Some(major), Some(minor)) = (numbers.next(), numbers.next())
            && (major, minor) >= OLDEST
        {
            return Ok(name.to_owned());
        }
    }
    Err(format!(
        "no Python of version {}.{} or newer was found: install python3 with venv",
        OLDEST.0, OLDEST.1
    ))
}

/// Runs a command to its end.
///
/// # Errors
/// Its name when it cannot be run or fails.
pub(crate) fn run(command: &mut Command, name: &str) -> Result<(), String> {
    let status = command.status().map_err(|error| format!("{name}: cannot be run: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{name}: ended with {status}")) }
}
