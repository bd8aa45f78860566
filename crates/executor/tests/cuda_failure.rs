//! A GPU that fails while it serves retires the model: every later request is refused at once, with the reason.
#![allow(clippy::unwrap_used)] // A failure here is a failed test.

use executor::{CacheLimits, CudaOptions, CudaProfile, ExecutorOptions, open_cuda};
use scheduler::Execute;
use testkit::checkpoint::tiny;
use testkit::trees::Trees;

#[test]
fn a_device_error_retires_the_model() {
    let (_dir, export) = tiny(3).unwrap();
    let options = ExecutorOptions {
        pass_tokens: 512,
        max_row_tokens: 2048,
        max_question_tokens: 512,
        cache: CacheLimits { states: 4, bytes: 64 << 20 },
        threads: 0,
    };
    let cuda = CudaOptions { ordinal: 0, profile: CudaProfile::Fast, graphs: true };
    let mut executor = open_cuda(&export, &options, cuda).unwrap();
    let tree = Trees::new(1, export.geometry.vocab).tree(45, &[30, 40]);
    assert_eq!(executor.execute(std::slice::from_ref(&tree)).unwrap()[0].logits.len(), 2);

    // The launch itself succeeds: the error arrives later, with whatever waits for the device next.
    executor.fail_device().unwrap();
    let first = executor.execute(std::slice::from_ref(&tree)).unwrap_err();
    assert!(first.reason.contains("device failure"), "{first}");
    let again = executor.execute(&[tree]).unwrap_err();
    assert_eq!(again.reason, first.reason);
}
