//! Owns comparisons: against FP64 within a bound, and bit for bit.

use super::Outcome;

/// Worst error as a share of `bound`. An error is measured against the expected value plus the root mean square of its
/// row of `width`: an element that cancels to nearly nothing cannot be asked to be exact, and a small row is not judged
/// by a large neighbour.
pub(super) fn close(found: &[f32], expected: &[f64], width: usize, bound: f64) -> Outcome {
    if found.len() != expected.len() || width == 0 {
        return Err(format!("{} values, expected {} of width {width}", found.len(), expected.len()));
    }
    let mut worst = 0.0f64;
    for (row, (found, expected)) in found.chunks(width).zip(expected.chunks(width)).enumerate() {
        let scale = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt();
        for (column, (found, expected)) in found.iter().zip(expected).enumerate() {
            let error = (f64::from(*found) - expected).abs();
            let allowed = bound * (expected.abs() + scale);
            // NaN is never within a bound.
            if error.is_nan() || error > allowed {
                return Err(format!(
                    "row {row} column {column}: {found} instead of {expected}, error {error:.2e} above {allowed:.2e}"
                ));
            }
            if error > 0.0 {
                worst = worst.max(error / allowed);
            }
        }
    }
    Ok(worst)
}

/// Equality of bits.
pub(super) fn same_bits(found: &[f32], expected: &[f32]) -> Outcome {
    if found.len() != expected.len() {
        return Err(format!("{} values, expected {}", found.len(), expected.len()));
    }
    let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
    match found.iter().zip(expected).position(differs) {
        None => Ok(0.0),
        Some(at) => {
            let count = found.iter().zip(expected).filter(|pair| differs(*pair)).count();
            Err(format!(
                "{count} of {} values have other bits, first at {at}: {} instead of {}",
                found.len(),
                found[at],
                expected[at]
            ))
        }
    }
}
