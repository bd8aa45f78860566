//! Owns the operations that stay within a row: norms, gates, activations. Sums run over eight lanes in a fixed order.

/// Sum of squares over eight interleaved lanes, then pairwise: the same order for every row, and one that vectorises.
#[inline(always)]
pub(crate) fn sum_squares(x: &[f32]) -> f32 {
    dot(x, x)
}

/// Dot product over sixteen interleaved lanes, then pairwise.
#[inline(always)]
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0f32; 16];
    let (xs, x_rest) = x.as_chunks::<16>();
    let (ys, y_rest) = y.as_chunks::<16>();
    for (x, y) in xs.iter().zip(ys) {
        for lane in 0..16 {
            lanes[lane] = x[lane].mul_add(y[lane], lanes[lane]);
        }
    }
    for (lane, (x, y)) in x_rest.iter().zip(y_rest).enumerate() {
        lanes[lane] = x.mul_add(*y, lanes[lane]);
    }
    for width in [8, 4, 2, 1] {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    lanes[0]
}

/// Zero-centred RMSNorm of one row.
#[inline(always)]
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / (sum_squares(x) / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * (1.0 + weight);
    }
}

pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// `ln(1 + e^x)`, and x itself above 20, as the reference computes it.
pub(crate) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_covers_every_element_at_every_length() {
        for length in 0..70 {
            let x: Vec<f32> = (0..length).map(|i| (i % 7) as f32).collect();
            let y: Vec<f32> = (0..length).map(|i| (i % 5) as f32 - 2.0).collect();
            let expected: f32 = x.iter().zip(&y).map(|(x, y)| x * y).sum();
            assert_eq!(dot(&x, &y), expected, "{length}");
        }
    }

    #[test]
    fn activations_have_their_limits() {
        assert_eq!(silu(0.0), 0.0);
        assert_eq!(silu(-200.0), -0.0);
        assert_eq!(sigmoid(200.0), 1.0);
        assert_eq!(softplus(21.0), 21.0);
        assert!((softplus(0.0) - std::f32::consts::LN_2).abs() < 1e-7);
        assert!(softplus(-30.0) > 0.0);
    }
}
