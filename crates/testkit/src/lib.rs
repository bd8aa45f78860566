//! Shared test support, never part of the product.

pub mod checkpoint;
pub mod fake;
pub mod golden;
pub mod ops;
pub mod trees;
