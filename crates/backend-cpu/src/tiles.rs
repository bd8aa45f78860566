//! Owns views of one matrix that several threads write at disjoint places. The one file of this crate with unsafe code.
#![allow(unsafe_code)] // Rust cannot split a slice along columns; the views are disjoint by construction.

use std::marker::PhantomData;

/// Exclusive access to a rectangle of a row-major matrix.
#[derive(Debug)]
pub(crate) struct Tile<'a> {
    start: *mut f32,
    stride: usize,
    rows: usize,
    width: usize,
    matrix: PhantomData<&'a mut [f32]>,
}

// SAFETY: a tile is an exclusive borrow of its elements, like the `&mut [f32]` it was cut from.
unsafe impl Send for Tile<'_> {}

impl Tile<'_> {
    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// A row of the rectangle, empty past the last one.
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        if row >= self.rows {
            return &mut [];
        }
        // SAFETY: `grid` made the rectangle inside one borrowed matrix, so `row * stride + width` elements from `start`
        // lie in it; no other tile holds them; the borrow of `self` forbids a second view of the same row.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.width) }
    }
}

/// Cuts a row-major matrix into consecutive rows of `heights` and consecutive columns of `widths`, from the first element
/// on; what does not fit is cut off. Tiles come row by row.
pub(crate) fn grid<'a>(
    matrix: &'a mut [f32],
    stride: usize,
    heights: impl IntoIterator<Item = usize>,
    widths: impl IntoIterator<Item = usize> + Clone,
) -> Vec<Tile<'a>> {
    let total = matrix.len().checked_div(stride).unwrap_or(0);
    let start = matrix.as_mut_ptr();
    let mut tiles = Vec::new();
    let mut top = 0;
    for height in heights {
        let rows = height.min(total - top);
        let mut left = 0;
        for width in widths.clone() {
            let width = width.min(stride - left);
            // An empty tile may begin one past the end of the matrix, where no pointer but the end itself may be made.
            let offset = if rows == 0 || width == 0 { 0 } else { top * stride + left };
            tiles.push(Tile {
                // SAFETY: `top < total` and `left < stride`, so the offset is inside the matrix; or it is 0.
                start: unsafe { start.add(offset) },
                stride,
                rows: if width == 0 { 0 } else { rows },
                width,
                matrix: PhantomData,
            });
            left += width;
        }
        top += rows;
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_a_matrix_once_and_never_leave_it() {
        for (rows, stride, heights, widths) in [
            (4, 6, vec![1, 3], vec![2, 0, 4]),
            (4, 6, vec![3, 0, 9], vec![5, 5]),
            (3, 1, vec![1, 1, 1, 1], vec![1, 1]),
            (0, 5, vec![2], vec![3, 3]),
        ] {
            let mut matrix = vec![0.0; rows * stride];
            for tile in &mut grid(&mut matrix, stride, heights, widths) {
                for row in 0..tile.rows() {
                    tile.row(row).iter_mut().for_each(|x| *x += 1.0);
                }
                let past = tile.rows();
                assert!(tile.row(past).is_empty());
            }
            assert!(matrix.iter().all(|x| *x == 1.0), "{rows} x {stride}: {matrix:?}");
        }
    }
}
