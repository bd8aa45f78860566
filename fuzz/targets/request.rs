//! Any bytes as the body of a request, through validation, rendering and tokens.
#![no_main]

use std::sync::OnceLock;

use artifact::synth::{Preset, synthesize};
use artifact::{PreTokenizer, Silent, Tokenizer};
use libfuzzer_sys::fuzz_target;
use processor::{Processor, ProcessorOptions};

fn processor() -> &'static Processor {
    static PROCESSOR: OnceLock<Processor> = OnceLock::new();
    PROCESSOR.get_or_init(|| {
        let dir = std::env::temp_dir().join(format!("omni-kev-fuzz-{}", std::process::id()));
        synthesize(&Preset::Tiny.recipe(), 0, &dir, &Silent).expect("a checkpoint");
        let tokenizer = Tokenizer::open(&dir.join("base"), PreTokenizer::Qwen2).expect("a tokenizer");
        std::fs::remove_dir_all(&dir).expect("the directory is removed");
        let options =
            ProcessorOptions { truncate_states: true, date_facts: true, ..ProcessorOptions::default() };
        Processor::new(tokenizer.into(), 2.0, options)
    })
}

fuzz_target!(|data: &[u8]| {
    if let Ok(request) = processor::parse_request(data)
        && let Ok(prepared) = processor().prepare(&request)
    {
        assert_eq!(prepared.tree.branches.len(), prepared.context.questions().count());
        let logits: Vec<Vec<f32>> =
            prepared.tree.branches.iter().map(|branch| vec![0.5; branch.option_ends.len()]).collect();
        processor().finish(&prepared.context, &logits).expect("finite logits have answers");
    }
});
