//! Owns which rows of the key arena are free.

use backend::KeyRange;

/// Free ranges, ordered and never touching.
#[derive(Debug)]
pub(crate) struct KeyRows {
    free: Vec<KeyRange>,
}

impl KeyRows {
    pub(crate) fn new(rows: usize) -> Self {
        Self { free: vec![KeyRange { row: 0, len: rows }] }
    }

    /// One range of `len` rows: the first hole that is large enough.
    pub(crate) fn take(&mut self, len: usize) -> Option<KeyRange> {
        let index = self.free.iter().position(|range| range.len >= len)?;
        let hole = &mut self.free[index];
        let taken = KeyRange { row: hole.row, len };
        hole.row += len;
        hole.len -= len;
        if hole.len == 0 {
            self.free.remove(index);
        }
        Some(taken)
    }

    /// Gives a range back.
    pub(crate) fn give(&mut self, range: KeyRange) {
        let index = self.free.partition_point(|hole| hole.row < range.row);
        self.free.insert(index, range);
        if index + 1 < self.free.len()
            && self.free[index].row + self.free[index].len == self.free[index + 1].row
        {
            self.free[index].len += self.free.remove(index + 1).len;
        }
        if index > 0 && self.free[index - 1].row + self.free[index - 1].len == self.free[index].row {
            self.free[index - 1].len += self.free.remove(index).len;
        }
    }

    #[cfg(test)]
    pub(crate) fn holes(&self) -> &[KeyRange] {
        &self.free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_again_in_any_order() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1]] {
            let mut rows = KeyRows::new(100);
            let taken: Vec<KeyRange> = [10, 20, 30].iter().map(|len| rows.take(*len).unwrap()).collect();
            assert_eq!(rows.take(41), None);
            for index in order {
                rows.give(taken[index]);
            }
            assert_eq!(rows.holes(), [KeyRange { row: 0, len: 100 }], "{order:?}");
        }
    }
}
