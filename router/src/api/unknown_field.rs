//! The fields of a request that this server does not know, with the known ones that were probably meant.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::known_field::{KnownFields, TYPE};

/// Unknown fields that are named; more are only counted.
const MAX_NAMED: usize = 16;
/// Fields of longer names have no near misses.
const MAX_NAME_BYTES: usize = 64;

/// A field that the server does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnknownField {
    /// Names from the top level on, separated by dots, with the numbers of items.
    pub(crate) path: String,
    hint: Option<Hint>,
}

/// What is known of an unknown field.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Hint {
    /// The path of the field that was probably meant.
    NearMiss(String),
    /// Objects of other types than this one have the field.
    OtherType(String),
}

impl fmt::Display for UnknownField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = &self.path;
        match &self.hint {
            None => write!(f, "unknown field `{path}`"),
            Some(Hint::NearMiss(near_miss)) => write!(f, "unknown field `{path}`; did you mean `{near_miss}`?"),
            Some(Hint::OtherType(kind)) => write!(f, "`{path}` has no effect with the type `{kind}`"),
        }
    }
}

/// What a request has beyond its known fields.
#[derive(Debug, Default)]
pub(crate) struct UnknownFields {
    /// The first ones, without those that are null.
    pub(crate) unknown: Vec<UnknownField>,
    pub(crate) num_more: usize,
    /// The path of the first list that is in the place of an object.
    pub(crate) misplaced_list: Option<String>,
}

/// The fields of this JSON that are unknown. JSON that cannot be read has none.
pub(crate) fn unknown_fields<'de, D: Deserializer<'de>>(known: &KnownFields, json: D) -> UnknownFields {
    let mut found = Found { root: known, fields: UnknownFields::default() };
    // The request was read before, or is refused.
    let _ = Walk { known, path: "", is_item: false, found: &mut found }.deserialize(json);
    found.fields
}

struct Found<'a> {
    root: &'a KnownFields,
    fields: UnknownFields,
}

impl Found<'_> {
    /// Adds an unknown field of an object at `place` with these `known` fields.
    fn add(&mut self, place: &str, name: &str, known: &KnownFields, other_type: Option<&str>) {
        let is_typo = |known: &String| num_typos(name, known) <= 1;
        if known.is_open && !known.fields.keys().any(is_typo) {
            return;
        }
        if self.fields.unknown.len() == MAX_NAMED {
            self.fields.num_more += 1;
            return;
        }
        let near_miss = || self.near_miss(place, name, known).map(Hint::NearMiss);
        let hint = other_type.map(|kind| Hint::OtherType(kind.to_owned())).or_else(near_miss);
        self.fields.unknown.push(UnknownField { path: joined(place, name), hint });
    }

    /// The known field that was probably meant: of the same place, else one of a place around or within it with this name, else one
    /// with a similar name.
    fn near_miss(&self, place: &str, name: &str, known: &KnownFields) -> Option<String> {
        if name.len() > MAX_NAME_BYTES {
            return None;
        }
        let rank = |path: String, is_elsewhere: bool| {
            let other = last_name(&path);
            let distance = if other == name { SAME_NAME_ELSEWHERE } else { distance(name, other)? };
            let is_far = distance > SAME_NAME_ELSEWHERE;
            Some(((is_far, is_elsewhere && distance != SAME_NAME_ELSEWHERE, distance, other.len()), path))
        };
        let here = known.fields.keys().filter_map(|other| rank(joined(place, other), false));
        let is_around = |path: &String| {
            let other = path.rsplit_once('.').map_or("", |(place, _)| place);
            place.starts_with(other) || other.starts_with(place)
        };
        let elsewhere = self.root.paths("").into_iter().filter(is_around).filter_map(|path| rank(path, true));
        let candidates = here.chain(elsewhere);
        // A field around this place is meant only if its name is near.
        candidates.filter(|((is_far, ..), path)| !is_far || path.starts_with(place)).min().map(|(_, path)| path)
    }
}

fn joined(place: &str, name: &str) -> String {
    if place.is_empty() { name.to_owned() } else { format!("{place}.{name}") }
}

fn last_name(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// Looks through one value. INVARIANT: no deeper than the known fields.
struct Walk<'a, 'b> {
    known: &'a KnownFields,
    path: &'b str,
    /// Whether the value is an item of a list.
    is_item: bool,
    found: &'b mut Found<'a>,
}

impl<'de> DeserializeSeed<'de> for Walk<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        if self.known.is_any() {
            return deserializer.deserialize_ignored_any(IgnoredAny).map(drop);
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk<'_, '_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("any value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { known: of_all_types, path, found, .. } = self;
        // The type decides which fields are known, and need not come first.
        let (mut kind, mut before) = (None, Vec::new());
        while of_all_types.has_types()
            && kind.is_none()
            && let Some(name) = map.next_key::<String>()?
        {
            let value: Value = map.next_value()?;
            match value {
                Value::String(given) if name == TYPE => kind = Some(given),
                value => before.push((name, value)),
            }
        }
        let known = of_all_types.of_type(kind.as_deref());
        if known.is_any() {
            while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            return Ok(());
        }
        let other_type = |name: &str| kind.as_deref().filter(|_| of_all_types.fields.contains_key(name));
        for (name, value) in before {
            match known.fields.get(&name) {
                // A value that was read has no errors.
                Some(known) => {
                    let path = &joined(path, &name);
                    let _ = Walk { known, path, is_item: false, found: &mut *found }.deserialize(&value);
                }
                None if value.is_null() => {}
                None => found.add(path, &name, known, other_type(&name)),
            }
        }
        while let Some(name) = map.next_key::<String>()? {
            match known.fields.get(&name) {
                Some(known) => {
                    let path = &joined(path, &name);
                    map.next_value_seed(Walk { known, path, is_item: false, found: &mut *found })?;
                }
                None => {
                    if map.next_value::<Option<IgnoredAny>>()?.is_some() {
                        found.add(path, &name, known, other_type(&name));
                    }
                }
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let Self { known, path, is_item, found } = self;
        if is_item || !known.is_list {
            found.fields.misplaced_list.get_or_insert_with(|| path.to_owned());
        }
        for index in 0.. {
            let path = &format!("{path}[{index}]");
            if items.next_element_seed(Walk { known, path, is_item: true, found: &mut *found })?.is_none() {
                break;
            }
        }
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// The distance of a field with the same name in another place. Nearer names in the same place come before it.
const SAME_NAME_ELSEWHERE: usize = 6;

/// How different two names are: 0 if they differ only in how their words are written; `None`: too different.
fn distance(one: &str, other: &str) -> Option<usize> {
    let by_typos = num_typos(one, other);
    let (one, other) = (words(one), words(other));
    let shorter = one.concat().len().min(other.concat().len());
    let by_typos = (by_typos <= shorter.div_ceil(5).min(3) && by_typos < shorter).then_some(2 * by_typos);
    // `max_tokens` and `max_new_tokens`, `stop_sequences` and `stop`; `max_completion_tokens` and `max_output_tokens`.
    let (few, many) = if one.len() < other.len() { (one, other) } else { (other, one) };
    let num_common = few.iter().filter(|word| many.contains(word)).count();
    let by_words = match few.len() - num_common {
        0 if few.concat().len() < 4 => None,
        0 => Some(if few.len() > 1 { 3 } else { 7 }),
        1 if few.len() > 2 && few.len() == many.len() => Some(5),
        _ => None,
    };
    [by_typos, by_words].into_iter().flatten().min()
}

/// The number of typing errors between two names, whose words may be written in different ways.
fn num_typos(one: &str, other: &str) -> usize {
    let [one, other] = [one, other].map(|name| words(name).concat());
    strsim::damerau_levenshtein(&one, &other)
}

/// The words of a name in snake case, kebab case or camel case.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for c in name.chars() {
        if c.is_uppercase() || matches!(c, '_' | '-') {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| !matches!(c, '_' | '-')) {
            word.extend(c.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}
