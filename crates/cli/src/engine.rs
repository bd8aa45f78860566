//! Owns what several commands share: opening an export, reading a request, running trees on the CPU.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use artifact::{Export, OpenOptions, Pins};
use clap::{Args, ValueEnum};
use decision::Tree;
use executor::{
    CacheLimits, CacheStats, CudaOptions, CudaProfile, DeviceMemory, ExecutorOptions, ServiceExecutor,
    ServiceOptions, open_cpu, open_cuda,
};
use processor::{Processor, ProcessorOptions};
use scheduler::Execute;

use crate::Internal;
use crate::progress::Shown;

/// Longest body read from a file or standard input.
const MAX_BODY: u64 = 64 << 20;

/// How requests are prepared.
#[derive(Clone, Args)]
pub(crate) struct ProcessorArguments {
    /// Longest state, in tokens
    #[arg(long, env = "OMNI_KEV_MAX_STATE_TOKENS", default_value_t = 65_536)]
    max_state_tokens: usize,
    /// Longest state plus one question, in tokens
    #[arg(long, env = "OMNI_KEV_MAX_ROW_TOKENS", default_value_t = 73_728)]
    max_row_tokens: usize,
    /// Longest question by itself, in tokens; a GPU takes no more than a batch has
    #[arg(long, env = "OMNI_KEV_MAX_QUESTION_TOKENS", default_value_t = 73_728)]
    max_question_tokens: usize,
    /// Cut a state that is too long instead of refusing it
    #[arg(long, env = "OMNI_KEV_TRUNCATE_STATES")]
    truncate_states: bool,
    /// Add facts about the dates of a state
    #[arg(long, env = "OMNI_KEV_DATE_FACTS")]
    date_facts: bool,
}

/// Where the model runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// A GPU if this machine has one that works, else its cores.
    Auto,
    /// This machine's cores.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// The arithmetic it runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Profile {
    /// FP32 throughout, over unrounded weights.
    Exact,
    /// BF16 weights and operands, FP32 sums, states and residual stream; GPUs only.
    Fast,
    /// The official BF16 service's passes, operations and roundings, for comparison with it; sm_90 GPUs with cuBLAS only.
    Service,
}

impl Profile {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Fast => "fast",
            Self::Service => "service",
        }
    }
}

/// How the model runs.
#[derive(Clone, Args)]
pub(crate) struct EngineArguments {
    /// Where the model runs
    #[arg(long, env = "OMNI_KEV_BACKEND", value_enum, default_value = "auto")]
    backend: Backend,
    /// GPU, in the driver's order; serve takes several, separated by commas, and runs the model on each
    #[arg(long, env = "OMNI_KEV_DEVICES", value_delimiter = ',', default_value = "0")]
    devices: Vec<usize>,
    /// Arithmetic of the model; by default fast on a GPU, exact on the CPU
    #[arg(long, env = "OMNI_KEV_PROFILE", value_enum)]
    profile: Option<Profile>,
    /// Tokens of a pass, a multiple of 64; by default 8192 on a GPU, 512 on the CPU
    #[arg(long, env = "OMNI_KEV_BATCH_TOKENS")]
    batch_tokens: Option<usize>,
    /// Launch every operation of every pass instead of replaying recorded ones
    #[arg(long, env = "OMNI_KEV_NO_CUDA_GRAPHS")]
    no_cuda_graphs: bool,
    /// Run the passes of profile service as they are, instead of padding them to the official service's buckets
    #[arg(long, env = "OMNI_KEV_SERVICE_EAGER")]
    service_eager: bool,
    /// Threads of the CPU; 0 means one per core
    #[arg(long, env = "OMNI_KEV_THREADS", default_value_t = 0)]
    threads: usize,
    /// States kept in the prefix cache; by default 32 on a GPU, 4 on the CPU
    #[arg(long, env = "OMNI_KEV_PREFIX_CACHE_STATES")]
    prefix_cache_states: Option<usize>,
    /// Bytes of the prefix cache; by default 4 GiB on a GPU, 1 GiB on the CPU
    #[arg(long, env = "OMNI_KEV_PREFIX_CACHE_BYTES")]
    prefix_cache_bytes: Option<usize>,
}

/// A loaded model and how it was loaded.
pub(crate) struct Engine {
    /// The executor.
    pub(crate) execute: Box<dyn Execute>,
    /// What prepares its requests, within its limits.
    pub(crate) processor: Processor,
    /// `cpu` or `cuda`.
    pub(crate) backend: &'static str,
    /// Arithmetic.
    pub(crate) profile: Profile,
    /// Device and profile, for people.
    pub(crate) description: String,
    /// Form of its passes, where the profile has several.
    pub(crate) form: Option<&'static str>,
    /// What results may depend on, by name: device, driver, kernels, libraries.
    pub(crate) identity: BTreeMap<String, String>,
    /// Counters of its prefix cache.
    pub(crate) cache: Arc<CacheStats>,
    /// Free and total bytes of a GPU.
    pub(crate) memory: Option<DeviceMemory>,
}

impl EngineArguments {
    /// The CPU where the choice was left open.
    pub(crate) fn on_cpu(mut self) -> Self {
        if self.backend == Backend::Auto {
            self.backend = Backend::Cpu;
        }
        self
    }

    /// Loads the model on every device of the arguments, at the same time.
    fn engines(&self, export: &Export, arguments: &ProcessorArguments) -> Result<Vec<Engine>> {
        if let [device] = self.devices[..] {
            return Ok(vec![self.engine(export, arguments, device)?]);
        }
        let mut seen = self.devices.clone();
        seen.sort_unstable();
        seen.dedup();
        anyhow::ensure!(seen.len() == self.devices.len(), "--devices: {:?} has a device twice", self.devices);
        std::thread::scope(|scope| {
            let load = |device: &usize| {
                let device = *device;
                scope.spawn(move || {
                    self.engine(export, arguments, device).with_context(|| format!("device {device}"))
                })
            };
            let loading: Vec<_> = self.devices.iter().map(load).collect();
            loading
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        })
    }

    /// The one device of a command that runs on one.
    fn device(&self) -> Result<usize> {
        match self.devices[..] {
            [device] => Ok(device),
            _ => anyhow::bail!("--devices: this command runs on one device, found {:?}", self.devices),
        }
    }

    /// Loads the model on a device.
    fn engine(&self, export: &Export, arguments: &ProcessorArguments, device: usize) -> Result<Engine> {
        let cuda = || self.cuda(export, arguments, device);
        match self.backend {
            Backend::Cuda => cuda(),
            Backend::Cpu => self.cpu(export, arguments),
            // A GPU that is there and refuses is an error: silently serving from the CPU would be a hundred times slower.
            Backend::Auto if executor::cuda_devices() > 0 => cuda(),
            Backend::Auto => self.cpu(export, arguments),
        }
    }

    /// The same choices as arguments of another command.
    pub(crate) fn forwarded(&self) -> Vec<String> {
        let mut words = vec![
            "--devices".to_owned(),
            self.devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
        ];
        let backend = self.backend.to_possible_value().map(|value| value.get_name().to_owned());
        let mut give = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                words.extend([name.to_owned(), value]);
            }
        };
        give("--backend", backend);
        give("--profile", self.profile.map(|profile| profile.name().to_owned()));
        give("--batch-tokens", self.batch_tokens.map(|tokens| tokens.to_string()));
        give("--threads", Some(self.threads.to_string()));
        give("--prefix-cache-states", self.prefix_cache_states.map(|states| states.to_string()));
        give("--prefix-cache-bytes", self.prefix_cache_bytes.map(|bytes| bytes.to_string()));
        if self.service_eager {
            words.push("--service-eager".to_owned());
        }
        if self.no_cuda_graphs {
            words.push("--no-cuda-graphs".to_owned());
        }
        words
    }

    fn options(&self, arguments: &ProcessorArguments, on_gpu: bool) -> ExecutorOptions {
        let pass_tokens = self.batch_tokens.unwrap_or(if on_gpu { 8192 } else { 512 });
        let longest = if on_gpu { pass_tokens } else { usize::MAX };
        let (states, bytes) = if on_gpu { (32, 4 << 30) } else { (4, 1 << 30) };
        ExecutorOptions {
            pass_tokens,
            max_row_tokens: arguments.max_row_tokens,
            max_question_tokens: arguments.max_question_tokens.min(longest),
            cache: CacheLimits {
                states: self.prefix_cache_states.unwrap_or(states),
                bytes: self.prefix_cache_bytes.unwrap_or(bytes),
            },
            threads: self.threads,
        }
    }

    fn cpu(&self, export: &Export, arguments: &ProcessorArguments) -> Result<Engine> {
        let profile = self.profile.unwrap_or(Profile::Exact);
        anyhow::ensure!(
            profile == Profile::Exact,
            "--profile {}: the CPU offers exact only; give --backend cuda on a machine with a GPU",
            profile.name()
        );
        let options = self.options(arguments, false);
        let executor = open_cpu(export, &options)?;
        let description = executor.describe();
        let cache = executor.cache_stats();
        let processor = arguments.processor(export, &options);
        Ok(Engine {
            cache,
            execute: Box::new(executor),
            processor,
            backend: "cpu",
            profile,
            description,
            form: None,
            identity: [("device".to_owned(), format!("cpu, {}", std::env::consts::ARCH))].into(),
            memory: None,
        })
    }

    fn cuda(&self, export: &Export, arguments: &ProcessorArguments, device: usize) -> Result<Engine> {
        let profile = self.profile.unwrap_or(Profile::Fast);
        let options = self.options(arguments, true);
        let arithmetic = match profile {
            Profile::Exact => CudaProfile::Exact,
            Profile::Fast => CudaProfile::Fast,
            Profile::Service => return self.service(export, arguments, device),
        };
        let cuda = CudaOptions { ordinal: device, profile: arithmetic, graphs: !self.no_cuda_graphs };
        let executor = open_cuda(export, &options, cuda)?;
        let description = executor.describe();
        let cache = executor.cache_stats();
        let memory = Some(executor.device_memory());
        let identity = executor.identity();
        let processor = arguments.processor(export, &options);
        Ok(Engine {
            execute: Box::new(executor),
            processor,
            backend: "cuda",
            profile,
            description,
            form: None,
            identity,
            cache,
            memory,
        })
    }
}

impl EngineArguments {
    /// The executor of profile `service` on the one device of the arguments.
    pub(crate) fn service_executor(
        &self,
        export: &Export,
        arguments: &ProcessorArguments,
    ) -> Result<ServiceExecutor> {
        self.service_executor_on(export, arguments, self.device()?)
    }

    fn service_executor_on(
        &self,
        export: &Export,
        arguments: &ProcessorArguments,
        ordinal: usize,
    ) -> Result<ServiceExecutor> {
        let options = ServiceOptions {
            ordinal,
            max_state_tokens: arguments.max_state_tokens,
            max_row_tokens: arguments.max_row_tokens,
            max_question_tokens: arguments.max_question_tokens,
            bucketed: !self.service_eager,
        };
        Ok(ServiceExecutor::open(export, &options)?)
    }

    fn service(&self, export: &Export, arguments: &ProcessorArguments, device: usize) -> Result<Engine> {
        let executor = self.service_executor_on(export, arguments, device)?;
        let description = executor.describe();
        let cache = executor.cache_stats();
        let memory = Some(executor.device_memory());
        let unlimited = ExecutorOptions { max_question_tokens: usize::MAX, ..ExecutorOptions::default() };
        let processor = arguments.processor(export, &unlimited);
        Ok(Engine {
            identity: executor.identity(),
            execute: Box::new(executor),
            processor,
            backend: "cuda",
            profile: Profile::Service,
            description,
            form: Some(if self.service_eager { "eager" } else { "bucketed" }),
            cache,
            memory,
        })
    }
}

impl ProcessorArguments {
    /// A processor for an export alone, without a model's limits.
    pub(crate) fn alone(&self, export: &Export) -> Processor {
        let unlimited = ExecutorOptions { max_question_tokens: usize::MAX, ..ExecutorOptions::default() };
        self.processor(export, &unlimited)
    }

    fn processor(&self, export: &Export, engine: &ExecutorOptions) -> Processor {
        let options = ProcessorOptions {
            max_state_tokens: self.max_state_tokens,
            max_row_tokens: self.max_row_tokens,
            max_question_tokens: self.max_question_tokens.min(engine.max_question_tokens),
            truncate_states: self.truncate_states,
            date_facts: self.date_facts,
        };
        Processor::new(export.tokenizer(), export.temperature, options)
    }
}

/// Runs trees; a failure here is never the caller's.
pub(crate) fn run_trees(engine: &mut impl Execute, trees: &[Tree]) -> Result<Vec<decision::Outcome>> {
    engine.execute(trees).map_err(|error| Internal(error.to_string()).into())
}

/// Verifies an export and loads its model at the same time, after `first` found nothing to refuse.
pub(crate) fn open_engine(
    dir: &Path,
    pins: Option<&PathBuf>,
    engine: &EngineArguments,
    processor: &ProcessorArguments,
    first: impl FnOnce(&Export) -> Result<()>,
) -> Result<(Export, Engine)> {
    let device = engine.device()?;
    let pins = pins.map(|path| Pins::read(path)).transpose()?;
    let (export, loaded) = Export::open_while(dir, &OpenOptions { pins }, &Shown::new(), |export| {
        first(export)?;
        engine.engine(export, processor, device)
    })?;
    Ok((export, loaded?))
}

/// Verifies an export and loads its model on every device of the arguments at the same time.
pub(crate) fn open_engines(
    dir: &Path,
    pins: Option<&PathBuf>,
    engine: &EngineArguments,
    processor: &ProcessorArguments,
) -> Result<(Export, Vec<Engine>)> {
    let pins = pins.map(|path| Pins::read(path)).transpose()?;
    let (export, loaded) = Export::open_while(dir, &OpenOptions { pins }, &Shown::new(), |export| {
        engine.engines(export, processor)
    })?;
    Ok((export, loaded?))
}

/// Opens and verifies an export.
pub(crate) fn open(dir: &Path, pins: Option<&PathBuf>) -> Result<Export> {
    let pins = pins.map(|path| Pins::read(path)).transpose()?;
    Ok(Export::open_with_progress(dir, &OpenOptions { pins }, &Shown::new())?)
}

/// Bytes of a file, or of standard input for `-` or no name.
pub(crate) fn read_input(path: Option<&Path>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match path.filter(|path| *path != Path::new("-")) {
        Some(path) => {
            let file =
                std::fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
            file.take(MAX_BODY + 1)
                .read_to_end(&mut bytes)
                .with_context(|| format!("cannot read {}", path.display()))?;
        }
        None => {
            std::io::stdin()
                .lock()
                .take(MAX_BODY + 1)
                .read_to_end(&mut bytes)
                .context("cannot read standard input")?;
        }
    }
    anyhow::ensure!(bytes.len() as u64 <= MAX_BODY, "input is longer than {MAX_BODY} bytes");
    Ok(bytes)
}

/// Right answers by question id.
pub(crate) type Labels = serde_json::Map<String, serde_json::Value>;

/// One line of a corpus.
pub(crate) struct CorpusLine {
    /// The case.
    pub(crate) name: String,
    /// The request's body.
    pub(crate) body: Vec<u8>,
    /// Right answers, where the corpus has them.
    pub(crate) expected: Labels,
}

/// Reads a corpus: `{"name": …, "request": {…}}` or `{"name": …, "request_text": "…"}` a line, with `"expected": {…}` where
/// right answers are known; other keys are ignored.
pub(crate) fn read_corpus(path: &Path) -> Result<(Vec<CorpusLine>, String)> {
    use sha2::Digest;
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let digest = hex::encode(sha2::Sha256::digest(&bytes));
    let text = std::str::from_utf8(&bytes).with_context(|| format!("{} is not UTF-8", path.display()))?;
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let at = || format!("{} line {}", path.display(), number + 1);
        // Our own reader: a request keeps its numbers' spelling and the order of its keys.
        let json = decision::parse::parse(line.as_bytes()).with_context(at)?;
        let decision::Json::Object(map) = json else { anyhow::bail!("{}: expected an object", at()) };
        let Some(decision::Json::String(name)) = map.get("name") else {
            anyhow::bail!("{}: name: expected a string", at())
        };
        let body = match (map.get("request_text"), map.get("request")) {
            (Some(decision::Json::String(text)), None) => text.clone().into_bytes(),
            (None, Some(request)) => {
                let mut text = String::new();
                processor::pytext::write_json(&mut text, request, processor::pytext::JsonStyle::Compact);
                text.into_bytes()
            }
            _ => anyhow::bail!("{}: expected either request or request_text", at()),
        };
        let expected = match map.get("expected") {
            None => Labels::new(),
            Some(labels) => {
                let mut text = String::new();
                processor::pytext::write_json(&mut text, labels, processor::pytext::JsonStyle::Compact);
                serde_json::from_str(&text).with_context(|| format!("{}: expected", at()))?
            }
        };
        lines.push(CorpusLine { name: name.clone(), body, expected });
    }
    Ok((lines, digest))
}
