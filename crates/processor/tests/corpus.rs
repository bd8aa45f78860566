//! Every request body that fuzzing kept, through the request path: each is prepared and answered, or refused with a 4xx's error.
#![allow(clippy::unwrap_used)] // A failure here is a failed test.

use std::path::Path;

use processor::{Processor, ProcessorOptions, parse_request};

#[test]
fn kept_bodies_are_answered_or_refused() {
    let (_dir, export) = testkit::checkpoint::tiny(0).unwrap();
    let options = ProcessorOptions { truncate_states: true, date_facts: true, ..ProcessorOptions::default() };
    let processor = Processor::new(export.tokenizer(), export.temperature, options);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/request");
    let (mut answered, mut refused) = (0, 0);
    for entry in std::fs::read_dir(folder).unwrap() {
        let body = std::fs::read(entry.unwrap().path()).unwrap();
        match parse_request(&body).and_then(|request| processor.prepare(&request)) {
            Err(_) => refused += 1,
            Ok(prepared) => {
                let branches = &prepared.tree.branches;
                let logits: Vec<Vec<f32>> =
                    branches.iter().map(|branch| vec![0.5; branch.option_ends.len()]).collect();
                processor.finish(&prepared.context, &logits).unwrap();
                answered += 1;
            }
        }
    }
    assert!(answered > 100 && refused > 500, "{answered} answered, {refused} refused");
}
