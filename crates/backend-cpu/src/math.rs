//! Owns scalar functions and reductions. Nothing here branches on data, so loops over them become vector instructions, and
//! every step is one IEEE operation in a fixed order, so the width of the vectors changes no bit.

/// `e^x` within 1 unit in the last place (Cephes' polynomial, reduction by ln 2 in two parts); 0 below -104, infinite
/// above 88.8, NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // 1.5 * 2^23: adding it rounds to an integer and leaves that integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-104.0, 89.0);
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let mut p = 1.987_569_1e-4f32;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p.mul_add(r, coefficient);
    }
    let p = p.mul_add(r * r, r) + 1.0;
    // 2^n in two factors: one alone leaves the range of exponents at both ends.
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23).cast_unsigned());
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
    let half = n >> 1;
    p * power(half) * power(n.wrapping_sub(half))
}

#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `ln(1 + e^x)`, and x itself above 20, as the reference computes it.
pub(crate) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Lanes of a reduction.
const LANES: usize = 32;

/// Dot product over 32 interleaved lanes, then pairwise.
#[inline(always)]
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (ys, y_rest) = y.as_chunks::<LANES>();
    for (x, y) in xs.iter().zip(ys) {
        for lane in 0..LANES {
            lanes[lane] = x[lane].mul_add(y[lane], lanes[lane]);
        }
    }
    for (lane, (x, y)) in x_rest.iter().zip(y_rest).enumerate() {
        lanes[lane] = x.mul_add(*y, lanes[lane]);
    }
    for width in [16, 8, 4, 2, 1] {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    lanes[0]
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(crate) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// RMSNorm of a row whose stored weight is the offset from 1.
#[inline(always)]
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = inverse_rms(x, eps);
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * (1.0 + weight);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_covers_every_element_at_every_length() {
        for length in 0..150 {
            let x: Vec<f32> = (0..length).map(|i| (i % 7) as f32).collect();
            let y: Vec<f32> = (0..length).map(|i| (i % 5) as f32 - 2.0).collect();
            let expected: f32 = x.iter().zip(&y).map(|(x, y)| x * y).sum();
            assert_eq!(dot(&x, &y), expected, "{length}");
        }
    }

    #[test]
    fn exp_is_within_a_unit_in_the_last_place_everywhere() {
        // Every 997th FP32 number, of both signs.
        for bits in (0..=u32::MAX).step_by(997) {
            let x = f32::from_bits(bits);
            let (found, exact) = (exp(x), f64::from(x).exp());
            if x.is_nan() {
                assert!(found.is_nan(), "{x}");
            } else if exact > f64::from(f32::MAX) {
                assert!(found == f32::INFINITY || found == f32::MAX, "{x}: {found}");
            } else {
                let ulp = (exact * 2f64.powi(-23)).max(2f64.powi(-149));
                assert!((f64::from(found) - exact).abs() <= 1.01 * ulp, "{x}: {found} {exact}");
            }
        }
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY), exp(f32::INFINITY)), (1.0, 0.0, f32::INFINITY));
    }

    /// What lets a masked key, whose weight is `exp(-inf)`, and a block without news, whose factor is `exp(0)`, change no
    /// bit of a sum.
    #[test]
    fn vectors_of_any_width_give_the_same_bits() {
        let x: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0) * 0.21).collect();
        let one_by_one: Vec<f32> = x.iter().map(|x| std::hint::black_box(exp(*x))).collect();
        let mut together = x.clone();
        pulp::Arch::new().dispatch(|| together.iter_mut().for_each(|x| *x = exp(*x)));
        assert_eq!(one_by_one, together);
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
