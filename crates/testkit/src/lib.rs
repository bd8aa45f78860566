//! Shared test support, never part of the product: the golden data of the reference service.

pub mod golden;
