//! Owns a build of the Containerfile without a container engine: its few instructions are carried out in a folder, so that a
//! file that moved, a program that does not run or a check that never succeeds is found here and not by an operator.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::distribution::Program;

/// How long the started program may take to be healthy.
const HEALTHY: Duration = Duration::from_secs(60);

/// An instruction of a Containerfile.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    From(String),
    Copy {
        image: Option<String>,
        from: String,
        to: String,
    },
    Run(Vec<String>),
    User(String),
    Env(String, String),
    /// The command, without its options.
    Health(Vec<String>),
    Entry(Vec<String>),
    Default(Vec<String>),
    /// Of no effect in a folder.
    Note,
}

/// Reads the instructions: only forms without a shell are known.
fn steps(text: &str) -> Result<Vec<Step>, String> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).map(step).collect()
}

fn step(line: &str) -> Result<Step, String> {
    let unknown = || format!("{line:?}: not an instruction that this check knows");
    let (name, rest) = line.split_once(' ').ok_or_else(unknown)?;
    let words: Vec<&str> = rest.split_whitespace().collect();
    let list = |text: &str| {
        serde_json::from_str::<Vec<String>>(text)
            .map_err(|_| format!("{line:?}: expected a list of strings, no shell"))
    };
    Ok(match (name, &words[..]) {
        ("FROM", [image]) => Step::From((*image).to_owned()),
        ("COPY", [from, to]) if !from.starts_with("--") => {
            Step::Copy { image: None, from: (*from).to_owned(), to: (*to).to_owned() }
        }
        ("COPY", [image, from, to]) if image.starts_with("--from=") => Step::Copy {
            image: image.strip_prefix("--from=").map(str::to_owned),
            from: (*from).to_owned(),
            to: (*to).to_owned(),
        },
        ("RUN", _) => Step::Run(list(rest)?),
        ("USER", [user]) => Step::User((*user).to_owned()),
        ("ENV", _) => {
            let (name, value) = rest.split_once('=').ok_or_else(unknown)?;
            Step::Env(name.to_owned(), value.to_owned())
        }
        ("HEALTHCHECK", _) => Step::Health(list(rest.split_once("CMD ").ok_or_else(unknown)?.1)?),
        ("ENTRYPOINT", _) => Step::Entry(list(rest)?),
        ("CMD", _) => Step::Default(list(rest)?),
        ("EXPOSE" | "STOPSIGNAL" | "LABEL", _) => Step::Note,
        _ => return Err(unknown()),
    })
}

/// A root folder in which the instructions were carried out.
struct Image<'a> {
    root: &'a Path,
    binary: &'a Path,
    /// The image's root.
    folder: PathBuf,
    environment: BTreeMap<String, String>,
    user: Option<String>,
    health: Vec<String>,
    entry: Vec<String>,
    default: Vec<String>,
}

/// Builds, starts and checks the image with `binary` as the release build and `export` as what it serves.
///
/// # Errors
/// The instruction that failed.
pub(crate) fn check(root: &Path, binary: &Path, export: &Path, folder: &Path) -> Result<(), String> {
    let path = root.join("deploy/Containerfile");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    if folder.exists() {
        std::fs::remove_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    let mut image = Image {
        root,
        binary,
        folder: folder.to_path_buf(),
        environment: BTreeMap::new(),
        user: None,
        health: Vec::new(),
        entry: Vec::new(),
        default: Vec::new(),
    };
    for step in steps(&text)? {
        image.carry_out(step)?;
    }
    match image.user.as_deref() {
        None | Some("root" | "0" | "0:0") => return Err("the Containerfile runs as the superuser".to_owned()),
        Some(user) => println!("container: runs as {user}"),
    }
    let mut help = image.command(&image.entry)?;
    help.arg("--help").stdout(Stdio::null());
    crate::python::run(&mut help, "ENTRYPOINT --help")?;
    image.serve(export)
}

impl Image<'_> {
    /// A path of the image on this machine.
    fn inside(&self, path: &str) -> PathBuf {
        self.folder.join(path.trim_start_matches('/'))
    }

    fn carry_out(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::From(image) => println!("container: a folder stands for {image}"),
            Step::Copy { image, from, to } => self.copy(image.as_deref(), &from, &to)?,
            Step::Run(words) => {
                println!("container: RUN {words:?}");
                let mut command = self.command(&words)?;
                crate::python::run(command.stdout(Stdio::null()), "RUN")?;
            }
            Step::User(user) => self.user = Some(user),
            Step::Env(name, value) => drop(self.environment.insert(name, value)),
            Step::Health(words) => self.health = words,
            Step::Entry(words) => self.entry = words,
            Step::Default(words) => self.default = words,
            Step::Note => {}
        }
        Ok(())
    }

    fn copy(&self, image: Option<&str>, from: &str, to: &str) -> Result<(), String> {
        let source = match image {
            // The same program from a package.
            Some(_) if from.ends_with("/busybox") => {
                Program::find(self.root, "busybox", "busybox-static")?.path().to_path_buf()
            }
            Some(image) => {
                return Err(format!("COPY from {image}: this check knows no substitute for {from}"));
            }
            None if from == "target/release/omni-kev" => self.binary.to_path_buf(),
            None => self.root.join(from),
        };
        let target = self.inside(to);
        println!("container: COPY {} to {to}", source.display());
        let parent = target.parent().ok_or_else(|| format!("COPY to {to}: no file"))?;
        std::fs::create_dir_all(parent).map_err(|error| format!("{}: {error}", parent.display()))?;
        let copied = std::fs::copy(&source, &target);
        copied.map(drop).map_err(|error| format!("COPY {from}: {}: {error}", source.display()))
    }

    /// A command of the image with its environment, its program taken from the folder.
    fn command(&self, words: &[String]) -> Result<Command, String> {
        let (program, arguments) = words.split_first().ok_or("a command without words")?;
        let path = self.inside(program);
        if !path.is_file() {
            return Err(format!("{program}: the image has no such file"));
        }
        let mut command = Command::new(path);
        command.args(arguments).env_clear().envs(&self.environment).current_dir(&self.folder);
        Ok(command)
    }

    /// Starts what the image starts, and asks its health check until it says yes.
    fn serve(&self, export: &Path) -> Result<(), String> {
        let port = free_port()?;
        let keys = self.inside("/api-keys");
        std::fs::write(&keys, "container-key\n").map_err(|error| format!("{}: {error}", keys.display()))?;
        let mut words = self.entry.clone();
        words.extend(self.default.iter().map(|word| match word.as_str() {
            "/export" => export.display().to_string(),
            other => other.to_owned(),
        }));
        let mut command = self.command(&words)?;
        command.env("OMNI_KEV_PORT", port.to_string()).env("OMNI_KEV_HOST", "127.0.0.1");
        command.env("OMNI_KEV_API_KEY_FILE", &keys).env("OMNI_KEV_BACKEND", "cpu").stdout(Stdio::null());
        let _running = Running(command.spawn().map_err(|error| format!("ENTRYPOINT: {error}"))?);
        let health: Vec<String> =
            self.health.iter().map(|word| word.replace(":8009", &format!(":{port}"))).collect();
        let started = Instant::now();
        let mut refused = 0;
        while started.elapsed() < HEALTHY {
            let mut ask = self.command(&health)?;
            let asked = ask.stdout(Stdio::null()).stderr(Stdio::null()).status();
            if asked.map_err(|error| format!("HEALTHCHECK: {error}"))?.success() {
                println!(
                    "container: healthy after {:.1} s, {refused} checks said no before",
                    started.elapsed().as_secs_f64()
                );
                return Ok(());
            }
            refused += 1;
            std::thread::sleep(Duration::from_millis(100));
        }
        Err("HEALTHCHECK: never said yes".to_owned())
    }
}

/// A process, killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> Result<u16, String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| format!("no free port: {error}"))?;
    listener.local_addr().map(|address| address.port()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_read_and_shells_are_refused() {
        let list = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let text = "# x\nFROM a\nCOPY b /c\nCOPY --from=i /d /e\nRUN [\"/c\", \"-v\"]\nUSER 1\nENV A=b c\n\
                    HEALTHCHECK --retries=3 CMD [\"/e\"]\nENTRYPOINT [\"/c\"]\nCMD [\"x\"]\nEXPOSE 1\n";
        let copy = |image: Option<&str>, from: &str, to: &str| Step::Copy {
            image: image.map(str::to_owned),
            from: from.to_owned(),
            to: to.to_owned(),
        };
        let expected = [
            Step::From("a".to_owned()),
            copy(None, "b", "/c"),
            copy(Some("i"), "/d", "/e"),
            Step::Run(list(&["/c", "-v"])),
            Step::User("1".to_owned()),
            Step::Env("A".to_owned(), "b c".to_owned()),
            Step::Health(list(&["/e"])),
            Step::Entry(list(&["/c"])),
            Step::Default(list(&["x"])),
            Step::Note,
        ];
        assert_eq!(steps(text).unwrap(), expected);
        for bad in ["RUN echo a", "ADD a b", "HEALTHCHECK CMD curl x", "COPY --link a b", "USER"] {
            assert!(steps(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_containerfile_has_only_known_instructions() {
        let text = std::fs::read_to_string(crate::root().join("deploy/Containerfile")).unwrap();
        let steps = steps(&text).unwrap();
        assert!(steps.iter().any(|step| matches!(step, Step::Health(_))));
    }
}
