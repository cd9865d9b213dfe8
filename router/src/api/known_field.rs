//! Fields of requests that this server does not know. Which it knows, their OpenAPI schemas say: a field that is read is
//! documented.
//!
//! A request is looked through at its top level, and in objects that are values of its fields (`parameters`,
//! `stream_options`, …), but not deeper, and not in lists (messages, tools), whose items have fields for the template.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use utoipa::ToSchema;
use utoipa::openapi::schema::{AdditionalProperties, Object, Schema};
use utoipa::openapi::{Ref, RefOr};

/// Unknown fields that are named; more are only counted.
const MAX_NAMED: usize = 16;
/// Deepest level of nested objects whose fields are looked at.
const MAX_DEPTH: usize = 2;
/// Fields with several kinds of values, of which the schemas describe the main ones; their readers refuse what they cannot use.
const READ_ELSEWHERE: [&str; 3] = ["grammar", "response_format", "tool_choice"];
/// Fields of longer names have no near misses.
const MAX_NAME_BYTES: usize = 64;

/// The fields of an object, each with the fields of its value. Without any, the object may have every field.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KnownFields(BTreeMap<String, KnownFields>);

/// A field that the server does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnknownField {
    /// Names from the top level on, separated by dots.
    pub(crate) path: String,
    /// The path of the known field that was probably meant.
    pub(crate) near_miss: Option<String>,
}

impl fmt::Display for UnknownField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown field `{}`", self.path)?;
        self.near_miss.as_ref().map_or(Ok(()), |near_miss| write!(f, "; did you mean `{near_miss}`?"))
    }
}

impl KnownFields {
    /// The fields of a request. `aliases`: names of fields that the schema does not have.
    pub(crate) fn of<T: ToSchema>(aliases: &[&str]) -> Self {
        let mut components = Vec::new();
        T::schemas(&mut components);
        let components: HashMap<_, _> = components.into_iter().collect();
        let mut fields = fields(&T::schema(), &components, MAX_DEPTH).unwrap_or_default();
        fields.0.extend(aliases.iter().map(|&alias| (alias.to_owned(), Self::default())));
        fields
    }

    /// The same, where the value of a field, or each item of it, is an object with one of these sets of fields.
    pub(crate) fn with_values(mut self, field: &str, values: impl IntoIterator<Item = Self>) -> Self {
        let known = values.into_iter().flat_map(|fields| fields.0).collect();
        self.0.insert(field.to_owned(), Self(known));
        self
    }

    /// The fields of this JSON that are unknown and not null, and the number of those that are not named. JSON that cannot be read has none.
    pub(crate) fn unknown_in<'de, D: Deserializer<'de>>(&self, json: D) -> (Vec<UnknownField>, usize) {
        let mut found = Found { root: self, unknown: Vec::new(), num_more: 0 };
        // The request was read before, or is refused.
        let _ = Walk { known: self, path: "", found: &mut found }.deserialize(json);
        (found.unknown, found.num_more)
    }

    /// The paths of all fields with those of their values.
    fn paths(&self, prefix: &str) -> Vec<String> {
        let paths = self.0.iter().flat_map(|(name, fields)| {
            let path = joined(prefix, name);
            let inner = fields.paths(&path);
            std::iter::once(path).chain(inner)
        });
        paths.collect()
    }

    /// The known field that an unknown one at `path` was probably meant to be: one of another place with this name, or one with a similar
    /// name, of the same place first.
    fn near_miss(&self, path: &str) -> Option<String> {
        let (place, name) = split(path);
        if name.len() > MAX_NAME_BYTES {
            return None;
        }
        let paths = self.paths("");
        let is_same = |path: &&String| split(path).1 == name;
        if let Some(path) = paths.iter().find(is_same) {
            return Some(path.clone());
        }
        let rank = |path: &String| {
            let (other_place, other) = split(path);
            Some((distance(name, other)?, other_place != place, other.len()))
        };
        paths.iter().filter_map(|path| Some((rank(path)?, path))).min().map(|(_, path)| path.clone())
    }
}

fn joined(prefix: &str, name: &str) -> String {
    if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") }
}

/// The place and the name of a field.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}

/// How different two names are: 0 if they differ only in how their words are written; `None`: too different.
fn distance(one: &str, other: &str) -> Option<usize> {
    let (one, other) = (words(one), words(other));
    let [joined_one, joined_other] = [&one, &other].map(|words| words.concat());
    let num_typos = strsim::damerau_levenshtein(&joined_one, &joined_other);
    let shorter = joined_one.len().min(joined_other.len());
    let by_typos = (num_typos <= shorter.div_ceil(5).min(3) && num_typos < shorter).then_some(2 * num_typos);
    // `max_tokens` and `max_new_tokens`, `stop_sequences` and `stop`.
    let (few, many) = if one.len() < other.len() { (one, other) } else { (other, one) };
    let is_contained = few.iter().all(|word| many.contains(word)) && few.concat().len() >= 4;
    let by_words = is_contained.then_some(if few.len() > 1 { 3 } else { 7 });
    [by_typos, by_words].into_iter().flatten().min()
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

type Components = HashMap<String, RefOr<Schema>>;

/// `None`: a value of this schema is no object.
fn fields(schema: &RefOr<Schema>, components: &Components, depth: usize) -> Option<KnownFields> {
    let schema = match schema {
        RefOr::Ref(Ref { ref_location, .. }) => {
            let name = ref_location.rsplit('/').next().unwrap_or_default();
            return components.get(name).and_then(|schema| fields(schema, components, depth));
        }
        RefOr::T(schema) => schema,
    };
    let parts = match schema {
        Schema::Object(object) => return of_object(object, components, depth),
        Schema::AllOf(all) => &all.items,
        Schema::OneOf(one) => &one.items,
        Schema::AnyOf(any) => &any.items,
        _ => return None,
    };
    let parts: Vec<_> = parts.iter().filter_map(|part| fields(part, components, depth)).collect();
    if parts.is_empty() || parts.iter().any(|part| part.0.is_empty()) {
        return parts.into_iter().find(|part| part.0.is_empty());
    }
    let mut all = KnownFields::default();
    for (name, inner) in parts.into_iter().flat_map(|part| part.0) {
        all.0.entry(name).or_default().0.extend(inner.0);
    }
    Some(all)
}

fn of_object(object: &Object, components: &Components, depth: usize) -> Option<KnownFields> {
    let is_open =
        !matches!(object.additional_properties.as_deref(), None | Some(AdditionalProperties::FreeForm(false)));
    if is_open || object.properties.is_empty() || depth == 0 {
        let is_object = serde_json::to_value(&object.schema_type).is_ok_and(|kind| kind.to_string().contains("object"));
        return (is_open || is_object || depth == 0).then(KnownFields::default);
    }
    let field = |(name, schema): (&String, &RefOr<Schema>)| {
        let inner = (!READ_ELSEWHERE.contains(&&**name)).then(|| fields(schema, components, depth - 1));
        (name.clone(), inner.flatten().unwrap_or_default())
    };
    Some(KnownFields(object.properties.iter().map(field).collect()))
}

struct Found<'a> {
    root: &'a KnownFields,
    unknown: Vec<UnknownField>,
    num_more: usize,
}

/// Looks through one value. INVARIANT: no deeper than the known fields.
struct Walk<'a, 'b> {
    known: &'a KnownFields,
    path: &'b str,
    found: &'b mut Found<'a>,
}

impl<'de> DeserializeSeed<'de> for Walk<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        if self.known.0.is_empty() {
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
        while let Some(name) = map.next_key::<String>()? {
            let path = joined(self.path, &name);
            if let Some(known) = self.known.0.get(&name) {
                map.next_value_seed(Walk { known, path: &path, found: &mut *self.found })?;
            } else if map.next_value::<Option<IgnoredAny>>()?.is_some() {
                if self.found.unknown.len() == MAX_NAMED {
                    self.found.num_more += 1;
                    continue;
                }
                let near_miss = self.found.root.near_miss(&path);
                self.found.unknown.push(UnknownField { path, near_miss });
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(Walk { known: self.known, path: self.path, found: &mut *self.found })?.is_some() {
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
