//! Owns the shapes of the official service's passes: what is padded to which bucket, and which rows share a pass. Knows no
//! device. `tools/reference/service.py` holds the same rules for the reference.

/// Longest padded state or question; longer ones run as they are.
pub(crate) const GRAPH_TOKENS: usize = 1024;
/// Longest state that padded questions continue.
pub(crate) const BANK_TOKENS: usize = 4096;
/// States of a padded pass.
pub(crate) const STATES_A_PASS: usize = 16;
/// Questions of a padded pass.
pub(crate) const ROWS_A_PASS: usize = 32;
/// Keys of a padded pass.
pub(crate) const KEYS_A_PASS: usize = 32_768;
/// Keys of a pass that is not padded, unless one question alone has more.
pub(crate) const EAGER_TOKENS: usize = 16_384;
/// What a pass costs at least, in tokens.
const SMALLEST_PASS: usize = 256;

fn stepped(n: usize, parts: usize, floor: usize) -> usize {
    let step = floor.max(n.next_power_of_two() / parts);
    n.div_ceil(step) * step
}

/// `n` rounded up to a multiple of an eighth of the power of two above it, at least 16.
pub(crate) fn bucket(n: usize) -> usize {
    stepped(n, 8, 16)
}

/// 1, 2, 3, 4, 6, 8, 12, 16, 24, 32.
pub(crate) fn count_bucket(n: usize) -> usize {
    stepped(n, 4, 1)
}

/// Places that the longest of some states takes in front of their questions.
pub(crate) fn bank(longest: usize) -> usize {
    longest.next_power_of_two().max(16)
}

/// Groups of indices of `lengths`: neighbours in sorted order, so that the sum over groups of max(256, count times length), both
/// padded, is least. `most(members, length)` bounds a group's members; of equal sums the larger last group is taken.
pub(crate) fn grouped(lengths: &[usize], most: impl Fn(&[usize], usize) -> usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|index| lengths[*index]);
    // Per number of items taken: the least cost, and where its last group begins.
    let mut best = vec![(0_usize, 0_usize)];
    for end in 1..=order.len() {
        let longest = bucket(lengths[order[end - 1]]);
        let mut choice: Option<(usize, usize)> = None;
        for start in (0..end).rev() {
            let count = end - start;
            // One item always goes alone, whatever its size.
            if count > 1 && count > most(&order[start..end], longest) {
                break;
            }
            let cost = best[start].0 + SMALLEST_PASS.max(count_bucket(count) * longest);
            if choice.is_none_or(|(least, _)| cost <= least) {
                choice = Some((cost, start));
            }
        }
        best.push(choice.unwrap_or((0, end - 1)));
    }
    let (mut groups, mut end) = (Vec::new(), order.len());
    while end > 0 {
        let start = best[end].1;
        groups.push(order[start..end].to_vec());
        end = start;
    }
    groups.reverse();
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_eighths_of_powers_of_two() {
        assert_eq!([1, 16, 17, 90, 129, 293, 1000, 1024].map(bucket), [16, 16, 32, 96, 160, 320, 1024, 1024]);
        let counts: Vec<usize> = (1..=32).map(count_bucket).collect();
        assert_eq!(counts[..9], [1, 2, 3, 4, 6, 6, 8, 8, 12]);
        assert!(counts.iter().all(|count| [1, 2, 3, 4, 6, 8, 12, 16, 24, 32].contains(count)));
        assert_eq!([1, 16, 17, 90, 4096].map(bank), [16, 16, 32, 128, 4096]);
    }

    #[test]
    fn rows_of_similar_length_share_a_pass() {
        // As tools/reference/service.py groups the same lengths.
        let groups = grouped(&[61, 105, 213, 147, 68, 35], |_, _| 32);
        assert_eq!(groups, [vec![5, 0, 4], vec![1, 3], vec![2]]);
    }

    #[test]
    fn groups_hold_every_row_once_and_keep_their_bound() {
        for (seed, most) in [(1_usize, 4_usize), (7, 32), (13, 1), (29, 3)] {
            let lengths: Vec<usize> = (0..100).map(|i| 1 + (i * 7919 * seed) % 1024).collect();
            let groups = grouped(&lengths, |_, _| most);
            let mut seen: Vec<usize> = groups.concat();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..100));
            assert!(groups.iter().all(|group| group.len() <= most));
        }
        assert!(grouped(&[], |_, _| 1).is_empty());
    }

    #[test]
    fn no_grouping_costs_less() {
        // Every partition of eight sorted lengths, against the chosen one.
        let lengths = [12, 30, 44, 45, 90, 260, 300, 700];
        let cost = |group: &[usize]| {
            let longest = group.iter().map(|index| lengths[*index]).max().unwrap();
            SMALLEST_PASS.max(count_bucket(group.len()) * bucket(longest))
        };
        let chosen: usize = grouped(&lengths, |_, _| 32).iter().map(|group| cost(group)).sum();
        for cuts in 0..1_u32 << 7 {
            let mut groups = vec![vec![0]];
            for index in 1..8 {
                if cuts >> (index - 1) & 1 == 1 {
                    groups.push(Vec::new());
                }
                groups.last_mut().unwrap().push(index);
            }
            assert!(chosen <= groups.iter().map(|group| cost(group)).sum(), "{groups:?}");
        }
    }
}
