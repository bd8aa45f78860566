//! Shared test support, never part of the product: the golden data of the reference service.

pub mod fake;
pub mod golden;
pub mod ops;
