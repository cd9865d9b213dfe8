//! Python's values that minijinja does not have: tuples, ranges, views of dictionaries, generators and bound methods.

use std::cmp::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// A sequence that is not a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SequenceKind {
    Tuple,
    /// A group of `groupby`: a tuple of the group's key and its items, which are also attributes.
    Group,
    /// With the text that Python writes for it.
    Range(String),
    /// With the name of its type.
    View(&'static str),
}

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) kind: SequenceKind,
    pub(super) items: Vec<Value>,
}

pub(super) fn tuple(items: Vec<Value>) -> Value {
    sequence(SequenceKind::Tuple, items)
}

pub(super) fn sequence(kind: SequenceKind, items: Vec<Value>) -> Value {
    Value::from_object(Sequence { kind, items })
}

impl Object for Sequence {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match self.kind {
            // Python cannot index a view.
            SequenceKind::View(_) => None,
            SequenceKind::Group if key.as_str() == Some("grouper") => self.items.first().cloned(),
            SequenceKind::Group if key.as_str() == Some("list") => self.items.get(1).cloned(),
            _ => self.items.get(key.as_usize()?).cloned(),
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items.clone())
    }
}

/// The items that a filter such as `map` returns: they can be read once, are true, and have no length.
#[derive(Debug)]
pub(super) struct Generator(Mutex<std::vec::IntoIter<Value>>);

impl Generator {
    pub(super) fn value(items: Vec<Value>) -> Value {
        Value::from_object(Self(Mutex::new(items.into_iter())))
    }

    pub(super) fn next(&self) -> Option<Value> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).next()
    }
}

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let generator = Arc::clone(self);
        Enumerator::Iter(Box::new(std::iter::from_fn(move || generator.next())))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }
}

/// A method of a value, which is an attribute of it.
#[derive(Debug)]
pub(super) struct BoundMethod {
    pub(super) object: Value,
    pub(super) name: String,
}

impl Object for BoundMethod {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &State<'_, '_>, arguments: &[Value]) -> Result<Value, Error> {
        self.object.call_method(state, &self.name, arguments)
    }
}

/// What Python calls the type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Undefined,
    None,
    Bool,
    Int,
    Float,
    Str,
    List,
    Tuple,
    Range,
    View,
    Dict,
    Generator,
    /// A function, a macro, a method, a namespace or another object of jinja.
    Object,
}

impl Type {
    pub(super) fn of(value: &Value) -> Self {
        match value.kind() {
            ValueKind::Undefined => Self::Undefined,
            ValueKind::None => Self::None,
            ValueKind::Bool => Self::Bool,
            ValueKind::Number if value.is_integer() => Self::Int,
            ValueKind::Number => Self::Float,
            ValueKind::String => Self::Str,
            ValueKind::Seq | ValueKind::Iterable => match value.downcast_object_ref::<Sequence>() {
                Some(sequence) => match sequence.kind {
                    SequenceKind::Tuple | SequenceKind::Group => Self::Tuple,
                    SequenceKind::Range(_) => Self::Range,
                    SequenceKind::View(_) => Self::View,
                },
                None if value.downcast_object_ref::<Generator>().is_some() => Self::Generator,
                None => Self::List,
            },
            ValueKind::Map if !value.as_object().is_some_and(is_of_the_engine) => Self::Dict,
            _ => Self::Object,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Undefined => "undefined value",
            Self::None => "none",
            Self::Bool => "bool",
            Self::Int => "int",
            Self::Float => "float",
            Self::Str => "str",
            Self::List => "list",
            Self::Tuple => "tuple",
            Self::Range => "range",
            Self::View => "dict view",
            Self::Dict => "dict",
            Self::Generator => "generator",
            Self::Object => "object",
        }
    }

    pub(super) fn is_number(self) -> bool {
        matches!(self, Self::Bool | Self::Int | Self::Float)
    }

    /// Whether Python can iterate over such a value. Jinja's undefined value has no items.
    pub(super) fn is_iterable(self) -> bool {
        !matches!(self, Self::None | Self::Bool | Self::Int | Self::Float | Self::Object)
    }

    /// Whether attributes of such a value include Python's method of this name.
    pub(super) fn has_method(self, name: &str) -> bool {
        let names: &[&str] = match self {
            Self::Dict => &[
                "clear",
                "copy",
                "fromkeys",
                "get",
                "items",
                "keys",
                "pop",
                "popitem",
                "setdefault",
                "update",
                "values",
            ],
            Self::List => {
                &["append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort"]
            }
            Self::Tuple | Self::Range => &["count", "index"],
            Self::Str => &[
                "capitalize",
                "casefold",
                "center",
                "count",
                "encode",
                "endswith",
                "expandtabs",
                "find",
                "format",
                "format_map",
                "index",
                "isalnum",
                "isalpha",
                "isascii",
                "isdecimal",
                "isdigit",
                "isidentifier",
                "islower",
                "isnumeric",
                "isprintable",
                "isspace",
                "istitle",
                "isupper",
                "join",
                "ljust",
                "lower",
                "lstrip",
                "maketrans",
                "partition",
                "removeprefix",
                "removesuffix",
                "replace",
                "rfind",
                "rindex",
                "rjust",
                "rpartition",
                "rsplit",
                "rstrip",
                "split",
                "splitlines",
                "startswith",
                "strip",
                "swapcase",
                "title",
                "translate",
                "upper",
                "zfill",
            ],
            _ => &[],
        };
        names.contains(&name)
    }
}

/// Whether minijinja made the object: a namespace, a loop or a macro.
fn is_of_the_engine(object: &DynObject) -> bool {
    let name = object.type_name();
    ["Namespace", "Loop", "Macro", "Module", "Closure"].iter().any(|suffix| name.ends_with(suffix))
}

pub(super) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// The items over which Python iterates.
pub(super) fn items(value: &Value) -> Result<Vec<Value>, Error> {
    let kind = Type::of(value);
    match kind {
        Type::Undefined => Ok(Vec::new()),
        Type::Str => Ok(value.as_str().unwrap_or_default().chars().map(|c| Value::from(c.to_string())).collect()),
        _ if kind.is_iterable() => Ok(value.try_iter()?.collect()),
        _ => Err(invalid(format!("a value of type {} has no items", kind.name()))),
    }
}

/// The value of a key, or an attribute of an object.
pub(super) fn lookup(value: &Value, key: &Value) -> Option<Value> {
    value.as_object().and_then(|object| object.get_value(key))
}

/// Python's `==`.
pub(super) fn equals(a: &Value, b: &Value) -> bool {
    let same_items = |a: &Value, b: &Value| {
        a.len() == b.len()
            && a.try_iter()
                .ok()
                .into_iter()
                .flatten()
                .zip(b.try_iter().ok().into_iter().flatten())
                .all(|(a, b)| equals(&a, &b))
    };
    match (Type::of(a), Type::of(b)) {
        (Type::List, Type::List) | (Type::Tuple, Type::Tuple) | (Type::Range, Type::Range) => same_items(a, b),
        (Type::Dict, Type::Dict) => {
            let has = |key: &Value| {
                lookup(b, key).is_some_and(|other| a.get_item(key).is_ok_and(|value| equals(&value, &other)))
            };
            a.len() == b.len() && a.try_iter().ok().into_iter().flatten().all(|key| has(&key))
        }
        (Type::Generator, Type::Generator) => {
            let generator = |value| Value::downcast_object_ref::<Generator>(value).map(std::ptr::from_ref);
            generator(a) == generator(b)
        }
        (first, second) if first == second || (first.is_number() && second.is_number()) => a == b,
        _ => false,
    }
}

/// Python's `<`, `==` or `>` of values that have an order.
pub(super) fn compare(a: &Value, b: &Value) -> Result<Option<Ordering>, Error> {
    let (first, second) = (Type::of(a), Type::of(b));
    match (first, second) {
        (Type::Str, Type::Str) => Ok(Some(a.as_str().cmp(&b.as_str()))),
        _ if first.is_number() && second.is_number() => {
            Ok(if a.is_integer() && b.is_integer() { Some(a.cmp(b)) } else { number(a).partial_cmp(&number(b)) })
        }
        (Type::List, Type::List) | (Type::Tuple, Type::Tuple) => {
            let (first, second) = (items(a)?, items(b)?);
            match first.iter().zip(&second).find(|(a, b)| !equals(a, b)) {
                Some((a, b)) => compare(a, b),
                None => Ok(Some(first.len().cmp(&second.len()))),
            }
        }
        _ => Err(invalid(format!("values of type {} and {} have no order", first.name(), second.name()))),
    }
}

/// The value of a number or of a truth value.
pub(super) fn number(value: &Value) -> f64 {
    match value.kind() {
        ValueKind::Bool => f64::from(u8::from(value.is_true())),
        _ => f64::try_from(value.clone()).unwrap_or(f64::NAN),
    }
}

/// The value of an integer or of a truth value.
pub(super) fn integer(value: &Value) -> Option<i128> {
    match Type::of(value) {
        Type::Bool => Some(i128::from(value.is_true())),
        Type::Int => i128::try_from(value.clone()).ok(),
        _ => None,
    }
}
