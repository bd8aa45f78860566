//! Owns the restricted reader of `head.pt`: a torch zip whose pickle may only build numbers, strings, lists, dicts and
//! tensors. It never imports, calls or constructs anything else, and refuses by name what it does not know.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use bytes::Bytes;

use crate::error::{ArtifactError, Result};
use crate::map::map_file;
use crate::weights::{Tensor, TensorType};

/// The largest unpacked member: a head of 2 x [256, 5120] in FP32 is 10 MB.
const MAX_MEMBER: u64 = 512 << 20;
/// The largest pickle program, and the most values it may build.
const MAX_PICKLE: u64 = 4 << 20;
const MAX_VALUES: usize = 200_000;

/// A value a checkpoint's pickle may hold.
#[derive(Clone, Debug)]
pub enum Value {
    /// `None`
    None,
    /// `True`, `False`
    Bool(bool),
    /// An integer that fits 64 bits.
    Int(i64),
    /// A float.
    Float(f64),
    /// A string.
    Text(String),
    /// A list or tuple.
    List(Vec<Value>),
    /// A dict with string keys.
    Dict(BTreeMap<String, Value>),
    /// A tensor.
    Tensor(Tensor),
}

#[derive(Clone, Debug)]
enum Item {
    Value(Value),
    Mark,
    Global(&'static str),
    /// Storage: member name, dtype, elements.
    Storage(String, TensorType, usize),
    /// A shared container: pickles build containers in place and may name them again through the memo.
    Shared(usize),
}

#[derive(Clone, Debug)]
enum Container {
    List(Vec<Item>),
    Dict(Vec<(Item, Item)>),
}

/// Reads the pickled value of a torch zip.
///
/// # Errors
/// [`ArtifactError::Format`] naming the file and the first thing it does not accept.
pub fn read_torch_zip(path: &Path) -> Result<Value> {
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    parse_torch_zip(&name, map_file(path)?)
}

/// Reads the pickled value of a torch zip held in memory.
///
/// # Errors
/// [`ArtifactError::Format`].
pub fn parse_torch_zip(name: &str, bytes: Bytes) -> Result<Value> {
    let fail = |reason: String| ArtifactError::format(name, reason);
    let mut archive = zip::ZipArchive::new(std::io::Cursor::new(bytes))
        .map_err(|error| fail(format!("is not a zip archive: {error}")))?;
    let pickle_name = archive
        .file_names()
        .filter_map(|member| member.ok().map(|member| member.into_owned()))
        .find(|member| member.ends_with("/data.pkl"))
        .ok_or_else(|| fail("has no data.pkl: it was not written by torch.save".to_owned()))?;
    let root = pickle_name.trim_end_matches("data.pkl").to_owned();
    let program = member(&mut archive, &pickle_name, MAX_PICKLE).map_err(&fail)?;
    if let Ok(order) = member(&mut archive, &format!("{root}byteorder"), 64)
        && order != b"little"
    {
        return Err(fail(format!("byte order {}, expected little", String::from_utf8_lossy(&order))));
    }
    let mut machine = Machine { stack: Vec::new(), memo: BTreeMap::new(), heap: Vec::new(), built: 0 };
    let top = machine.run(&program).map_err(&fail)?;
    let mut members = BTreeMap::new();
    machine
        .resolve(&top, 0, &mut |key, bytes_wanted| {
            if !members.contains_key(key) {
                let data = member(&mut archive, &format!("{root}data/{key}"), MAX_MEMBER)?;
                members.insert(key.to_owned(), Bytes::from(data));
            }
            let data = members.get(key).cloned().unwrap_or_default();
            if data.len() != bytes_wanted {
                return Err(format!("storage {key} has {} bytes, expected {bytes_wanted}", data.len()));
            }
            Ok(data)
        })
        .map_err(fail)
}

fn member(
    archive: &mut zip::ZipArchive<std::io::Cursor<Bytes>>,
    name: &str,
    limit: u64,
) -> std::result::Result<Vec<u8>, String> {
    let file = archive.by_name(name).map_err(|error| format!("member {name:.120}: {error}"))?;
    let mut data = Vec::new();
    // The declared size can lie, so the bound is on what comes out.
    file.take(limit + 1).read_to_end(&mut data).map_err(|error| format!("member {name:.120}: {error}"))?;
    if data.len() as u64 > limit {
        return Err(format!("member {name:.120} unpacks to more than {limit} bytes"));
    }
    Ok(data)
}

struct Machine {
    stack: Vec<Item>,
    memo: BTreeMap<u32, Item>,
    heap: Vec<Container>,
    built: usize,
}

type Step<T> = std::result::Result<T, String>;

impl Machine {
    fn run(&mut self, program: &[u8]) -> Step<Item> {
        let mut code = Reader { bytes: program, at: 0 };
        loop {
            self.built += 1;
            if self.built > MAX_VALUES {
                return Err(format!("pickle runs more than {MAX_VALUES} operations"));
            }
            let at = code.at;
            match code.byte()? {
                0x80 => match code.byte()? {
                    2..=5 => {}
                    other => return Err(format!("pickle protocol {other}, expected 2 to 5")),
                },
                0x95 => {
                    code.take(8)?;
                }
                b'.' => return self.pop(),
                b'(' => self.stack.push(Item::Mark),
                b'}' => self.container(Container::Dict(Vec::new())),
                b']' => self.container(Container::List(Vec::new())),
                b')' => self.push(Value::List(Vec::new())),
                b'N' => self.push(Value::None),
                0x88 => self.push(Value::Bool(true)),
                0x89 => self.push(Value::Bool(false)),
                b'K' => {
                    let value = code.byte()?;
                    self.push(Value::Int(i64::from(value)));
                }
                b'M' => {
                    let value = u16::from_le_bytes(code.array()?);
                    self.push(Value::Int(i64::from(value)));
                }
                b'J' => {
                    let value = i32::from_le_bytes(code.array()?);
                    self.push(Value::Int(i64::from(value)));
                }
                0x8a => {
                    let length = usize::from(code.byte()?);
                    let value = long(code.take(length)?)?;
                    self.push(Value::Int(value));
                }
                b'G' => {
                    let value = f64::from_be_bytes(code.array()?);
                    self.push(Value::Float(value));
                }
                b'X' => {
                    let length = u32::from_le_bytes(code.array()?) as usize;
                    let text = code.text(length)?;
                    self.push(Value::Text(text));
                }
                0x8c => {
                    let length = usize::from(code.byte()?);
                    let text = code.text(length)?;
                    self.push(Value::Text(text));
                }
                b'q' => {
                    let key = u32::from(code.byte()?);
                    self.remember(key)?;
                }
                b'r' => {
                    let key = u32::from_le_bytes(code.array()?);
                    self.remember(key)?;
                }
                0x94 => self.remember(self.memo.len() as u32)?,
                b'h' => {
                    let key = u32::from(code.byte()?);
                    self.recall(key)?;
                }
                b'j' => {
                    let key = u32::from_le_bytes(code.array()?);
                    self.recall(key)?;
                }
                b'c' => {
                    let module = code.line()?;
                    let name = code.line()?;
                    self.stack.push(Item::Global(global(&module, &name)?));
                }
                0x93 => {
                    let name = self.pop_text()?;
                    let module = self.pop_text()?;
                    self.stack.push(Item::Global(global(&module, &name)?));
                }
                b't' => {
                    let items = self.pop_mark()?;
                    self.container(Container::List(items));
                }
                0x85..=0x87 => {
                    let count = usize::from(program[at] - 0x84);
                    let start = self.stack.len().checked_sub(count).ok_or("pickle stack is too short")?;
                    let items = self.stack.split_off(start);
                    self.container(Container::List(items));
                }
                b'Q' => {
                    let id = self.pop()?;
                    let storage = self.storage(&id)?;
                    self.stack.push(storage);
                }
                b'R' => {
                    let arguments = self.pop()?;
                    let function = self.pop()?;
                    self.call(&function, arguments)?;
                }
                // A state dict is an OrderedDict that carries its module versions as an attribute; nobody needs those.
                b'b' => {
                    let state = self.pop()?;
                    self.dict()?;
                    if !self.is_metadata(&state) {
                        return Err("pickle sets attributes other than a state dict's _metadata".to_owned());
                    }
                }
                b's' => {
                    let value = self.pop()?;
                    let key = self.pop()?;
                    self.dict()?.push((key, value));
                }
                b'u' => {
                    let items = self.pop_mark()?;
                    if items.len() % 2 != 0 {
                        return Err("pickle sets a key without a value".to_owned());
                    }
                    let mut items = items.into_iter();
                    let dict = self.dict()?;
                    while let (Some(key), Some(value)) = (items.next(), items.next()) {
                        dict.push((key, value));
                    }
                }
                b'a' => {
                    let value = self.pop()?;
                    self.list()?.push(value);
                }
                b'e' => {
                    let items = self.pop_mark()?;
                    self.list()?.extend(items);
                }
                other => return Err(format!("pickle operation 0x{other:02x} at byte {at} is not allowed")),
            }
        }
    }

    fn push(&mut self, value: Value) {
        self.stack.push(Item::Value(value));
    }

    fn container(&mut self, container: Container) {
        self.heap.push(container);
        self.stack.push(Item::Shared(self.heap.len() - 1));
    }

    fn pop(&mut self) -> Step<Item> {
        self.stack.pop().ok_or_else(|| "pickle stack is empty".to_owned())
    }

    fn pop_text(&mut self) -> Step<String> {
        match self.pop()? {
            Item::Value(Value::Text(text)) => Ok(text),
            _ => Err("pickle names a global by something that is not a string".to_owned()),
        }
    }

    fn pop_mark(&mut self) -> Step<Vec<Item>> {
        let mark =
            self.stack.iter().rposition(|item| matches!(item, Item::Mark)).ok_or("pickle has no mark")?;
        let items = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(items)
    }

    fn remember(&mut self, key: u32) -> Step<()> {
        let item = self.stack.last().cloned().ok_or("pickle stack is empty")?;
        self.memo.insert(key, item);
        Ok(())
    }

    fn recall(&mut self, key: u32) -> Step<()> {
        let item = self
            .memo
            .get(&key)
            .cloned()
            .ok_or_else(|| format!("pickle recalls {key}, which it never stored"))?;
        self.stack.push(item);
        Ok(())
    }

    fn dict(&mut self) -> Step<&mut Vec<(Item, Item)>> {
        match self.stack.last() {
            Some(Item::Shared(index)) => match self.heap.get_mut(*index) {
                Some(Container::Dict(entries)) => Ok(entries),
                _ => Err("pickle sets a key of something that is not a dict".to_owned()),
            },
            _ => Err("pickle sets a key of something that is not a dict".to_owned()),
        }
    }

    fn is_metadata(&self, state: &Item) -> bool {
        let Item::Shared(index) = state else { return false };
        let Some(Container::Dict(entries)) = self.heap.get(*index) else { return false };
        entries.iter().all(|(key, _)| matches!(key, Item::Value(Value::Text(key)) if key == "_metadata"))
    }

    fn list(&mut self) -> Step<&mut Vec<Item>> {
        match self.stack.last() {
            Some(Item::Shared(index)) => match self.heap.get_mut(*index) {
                Some(Container::List(items)) => Ok(items),
                _ => Err("pickle appends to something that is not a list".to_owned()),
            },
            _ => Err("pickle appends to something that is not a list".to_owned()),
        }
    }

    fn items(&self, item: &Item) -> Step<Vec<Item>> {
        match item {
            Item::Shared(index) => match self.heap.get(*index) {
                Some(Container::List(items)) => Ok(items.clone()),
                _ => Err("pickle passes a dict where arguments belong".to_owned()),
            },
            Item::Value(Value::List(items)) if items.is_empty() => Ok(Vec::new()),
            _ => Err("pickle passes no arguments".to_owned()),
        }
    }

    /// `("storage", type, key, location, elements)`
    fn storage(&self, id: &Item) -> Step<Item> {
        let parts = self.items(id)?;
        match parts.as_slice() {
            [
                Item::Value(Value::Text(tag)),
                Item::Global(kind),
                Item::Value(Value::Text(key)),
                Item::Value(Value::Text(_)),
                Item::Value(Value::Int(n)),
            ] if tag == "storage" => {
                let dtype = match *kind {
                    "FloatStorage" => TensorType::F32,
                    "BFloat16Storage" => TensorType::BF16,
                    other => {
                        return Err(format!(
                            "tensor storage {other}, expected FloatStorage or BFloat16Storage"
                        ));
                    }
                };
                if !key.bytes().all(|b| b.is_ascii_digit()) || key.len() > 9 {
                    return Err(format!("storage key {key:.40} is not a number"));
                }
                let elements = usize::try_from(*n).map_err(|_| format!("storage of {n} elements"))?;
                Ok(Item::Storage(key.clone(), dtype, elements))
            }
            _ => Err("pickle has a persistent id that is not a tensor storage".to_owned()),
        }
    }

    fn call(&mut self, function: &Item, arguments: Item) -> Step<()> {
        match function {
            Item::Global("OrderedDict") if self.items(&arguments)?.is_empty() => {
                self.container(Container::Dict(Vec::new()));
                Ok(())
            }
            // Kept as its arguments; resolved when the storages are read.
            Item::Global("_rebuild_tensor_v2") => {
                let mut parts = vec![Item::Global("_rebuild_tensor_v2")];
                parts.extend(self.items(&arguments)?);
                self.container(Container::List(parts));
                Ok(())
            }
            Item::Global(name) => {
                Err(format!("pickle calls {name} with arguments this reader does not accept"))
            }
            _ => Err("pickle calls something that is not a known function".to_owned()),
        }
    }

    fn resolve(
        &self,
        item: &Item,
        depth: usize,
        storage: &mut dyn FnMut(&str, usize) -> Step<Bytes>,
    ) -> Step<Value> {
        if depth > 32 {
            return Err("pickle nests more than 32 deep".to_owned());
        }
        match item {
            Item::Value(value) => Ok(value.clone()),
            Item::Shared(index) => match self.heap.get(*index) {
                Some(Container::List(items))
                    if matches!(items.first(), Some(Item::Global("_rebuild_tensor_v2"))) =>
                {
                    self.tensor(items, storage).map(Value::Tensor)
                }
                Some(Container::List(items)) => items
                    .iter()
                    .map(|item| self.resolve(item, depth + 1, storage))
                    .collect::<Step<_>>()
                    .map(Value::List),
                Some(Container::Dict(entries)) => {
                    let mut dict = BTreeMap::new();
                    for (key, value) in entries {
                        let Item::Value(Value::Text(key)) = key else {
                            return Err("pickle has a dict key that is not a string".to_owned());
                        };
                        dict.insert(key.clone(), self.resolve(value, depth + 1, storage)?);
                    }
                    Ok(Value::Dict(dict))
                }
                None => Err("pickle refers to nothing".to_owned()),
            },
            Item::Global(name) => Err(format!("pickle keeps the function {name} as a value")),
            Item::Mark | Item::Storage(..) => {
                Err("pickle keeps a bare storage or mark as a value".to_owned())
            }
        }
    }

    /// `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)`, contiguous tensors only.
    fn tensor(&self, items: &[Item], storage: &mut dyn FnMut(&str, usize) -> Step<Bytes>) -> Step<Tensor> {
        let [_, Item::Storage(key, dtype, elements), Item::Value(Value::Int(offset)), size, stride, ..] =
            items
        else {
            return Err("pickle rebuilds a tensor from something else than a storage".to_owned());
        };
        let shape = self.dims(size)?;
        let strides = self.dims(stride)?;
        let mut expected = 1usize;
        for (dim, stride) in shape.iter().zip(&strides).rev() {
            if *dim > 1 && *stride != expected {
                return Err(format!(
                    "tensor of shape {shape:?} has strides {strides:?}, expected a contiguous one"
                ));
            }
            expected = expected.checked_mul(*dim).ok_or("tensor size overflows")?;
        }
        let offset = usize::try_from(*offset).map_err(|_| "tensor has a negative offset")?;
        let end = offset.checked_add(expected).filter(|end| end <= elements && shape.len() == strides.len());
        let Some(end) = end else {
            return Err(format!(
                "tensor of shape {shape:?} at {offset} lies outside its storage of {elements} elements"
            ));
        };
        let bytes = elements.checked_mul(dtype.size()).ok_or("storage size overflows")?;
        let data = storage(key, bytes)?.slice(offset * dtype.size()..end * dtype.size());
        Ok(Tensor { dtype: *dtype, shape, data })
    }

    fn dims(&self, item: &Item) -> Step<Vec<usize>> {
        let items = self.items(item)?;
        if items.len() > 8 {
            return Err("tensor has more than 8 dimensions".to_owned());
        }
        items
            .iter()
            .map(|item| match item {
                Item::Value(Value::Int(n)) => {
                    usize::try_from(*n).map_err(|_| "tensor has a negative dimension".to_owned())
                }
                _ => Err("tensor has a dimension that is not a number".to_owned()),
            })
            .collect()
    }
}

fn global(module: &str, name: &str) -> Step<&'static str> {
    match (module, name) {
        ("collections", "OrderedDict") => Ok("OrderedDict"),
        ("torch._utils", "_rebuild_tensor_v2") => Ok("_rebuild_tensor_v2"),
        ("torch", "FloatStorage") => Ok("FloatStorage"),
        ("torch", "BFloat16Storage") => Ok("BFloat16Storage"),
        ("torch", "HalfStorage" | "DoubleStorage" | "LongStorage" | "IntStorage" | "BoolStorage") => {
            Ok("another storage type")
        }
        _ => Err(format!(
            "pickle names {module:.60}.{name:.60}, which this reader does not know and will not run"
        )),
    }
}

fn long(bytes: &[u8]) -> Step<i64> {
    if bytes.len() > 8 {
        return Err(format!("pickle has an integer of {} bytes, expected at most 8", bytes.len()));
    }
    let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
    let mut padded = [if negative { 0xff } else { 0 }; 8];
    padded[..bytes.len()].copy_from_slice(bytes);
    Ok(i64::from_le_bytes(padded))
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Step<&'a [u8]> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let Some(end) = end else {
            return Err(format!("pickle ends inside an operation at byte {}", self.at));
        };
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn byte(&mut self) -> Step<u8> {
        Ok(self.take(1)?[0])
    }

    fn array<const N: usize>(&mut self) -> Step<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| "pickle ends inside a number".to_owned())
    }

    fn text(&mut self, length: usize) -> Step<String> {
        String::from_utf8(self.take(length)?.to_vec())
            .map_err(|_| "pickle has a string that is not UTF-8".to_owned())
    }

    fn line(&mut self) -> Step<String> {
        let rest = &self.bytes[self.at..];
        let length =
            rest.iter().take(256).position(|byte| *byte == b'\n').ok_or("pickle has an endless name")?;
        let text = self.text(length)?;
        self.at += 1;
        Ok(text)
    }
}
