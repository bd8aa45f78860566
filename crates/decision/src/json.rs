//! Owns an ordered JSON value that keeps what the reference's JSON reader keeps, and nothing a text could forge.

use indexmap::IndexMap;

/// A JSON value. Objects keep the order of first appearance; a repeated key keeps its first place and takes
/// its last value, as Python's reader does.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// An integer of any size or a double.
    Number(Number),
    /// A string of Unicode scalar values.
    String(String),
    /// An array.
    Array(Vec<Json>),
    /// An object, in order of first appearance.
    Object(IndexMap<String, Json>),
}

/// A JSON number, split as Python splits it: no fraction and no exponent means an integer.
#[derive(Clone, Debug, PartialEq)]
pub enum Number {
    /// Canonical decimal digits with an optional leading `-` (never `-0`, no leading zeros), any size.
    Integer(String),
    /// A double; NaN and infinities are possible, as in the reference's reader.
    Float(f64),
}
