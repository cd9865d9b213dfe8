//! The fields that requests may have. Their OpenAPI schemas say which: a field that is read is documented.
//!
//! A request is looked through in all its objects and lists, except values that hold any JSON (a schema, `metadata`, …).

use std::collections::{BTreeMap, HashMap};

use utoipa::ToSchema;
use utoipa::openapi::schema::{AdditionalProperties, ArrayItems, Object, Schema};
use utoipa::openapi::{Ref, RefOr};

/// Deepest level of nested objects whose fields are looked at.
const MAX_DEPTH: usize = 8;

/// The field that says which others an object has.
pub(super) const TYPE: &str = "type";

/// The fields of an object, or of each item of a list, with the fields of their values. Without any, the value may be anything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KnownFields {
    /// The fields of an object of any type.
    pub(super) fields: BTreeMap<String, KnownFields>,
    /// The fields of an object of each type, where the types differ. An object of another type may have any field.
    by_type: BTreeMap<String, KnownFields>,
    /// Whether the prompt's template sees further fields. Only those whose names look like typos are then unknown.
    pub(super) is_open: bool,
    pub(super) is_list: bool,
}

/// A value that may be anything.
static ANY: KnownFields =
    KnownFields { fields: BTreeMap::new(), by_type: BTreeMap::new(), is_open: false, is_list: false };

impl KnownFields {
    /// The fields of a request.
    pub(crate) fn of<T: ToSchema>() -> Self {
        let mut components = Vec::new();
        T::schemas(&mut components);
        let components: HashMap<_, _> = components.into_iter().collect();
        fields(&T::schema(), &components, MAX_DEPTH).unwrap_or_default()
    }

    /// Adds fields that the schema does not have to the objects at `place`, a path without the numbers of items.
    pub(crate) fn with(mut self, place: &str, names: &[&str]) -> Self {
        self.change(place, &mut |object| {
            if !object.is_any() {
                object.fields.extend(names.iter().map(|&name| (name.to_owned(), Self::default())));
            }
        });
        self
    }

    /// The objects at `place`, of which the schema says nothing, have these fields.
    pub(crate) fn only(mut self, place: &str, names: &[&str]) -> Self {
        let fields: BTreeMap<_, _> = names.iter().map(|&name| (name.to_owned(), Self::default())).collect();
        self.change(place, &mut |object| object.fields.clone_from(&fields));
        self
    }

    /// The objects at `place` may have further fields, which the template sees.
    pub(crate) fn open(mut self, place: &str) -> Self {
        self.change(place, &mut |object| object.is_open = true);
        self
    }

    /// Only objects of these types, or without a type, are looked through at `place`.
    pub(crate) fn only_types(mut self, place: &str, types: &[&str]) -> Self {
        self.change(place, &mut |object| {
            let of_type = Self { by_type: BTreeMap::new(), ..object.clone() };
            object.by_type = types.iter().map(|&kind| (kind.to_owned(), of_type.clone())).collect();
        });
        self
    }

    /// Objects of these types are not looked through at `place`.
    pub(crate) fn except_types(mut self, place: &str, types: &[&str]) -> Self {
        self.change(place, &mut |object| object.by_type.retain(|kind, _| !types.contains(&kind.as_str())));
        self
    }

    /// Each item of the list in `field` is an object with one of these sets of fields.
    pub(crate) fn with_items(mut self, field: &str, items: impl IntoIterator<Item = Self>) -> Self {
        let fields = items.into_iter().flat_map(|item| item.fields).collect();
        self.fields.insert(field.to_owned(), Self { fields, is_list: true, ..Self::default() });
        self
    }

    pub(super) fn is_any(&self) -> bool {
        self.fields.is_empty()
    }

    pub(super) fn has_types(&self) -> bool {
        !self.by_type.is_empty()
    }

    /// The fields of an object of this type.
    pub(super) fn of_type(&self, kind: Option<&str>) -> &Self {
        match kind {
            Some(kind) if self.has_types() => self.by_type.get(kind).unwrap_or(&ANY),
            _ => self,
        }
    }

    /// The paths of all fields with those of their values, except within lists.
    pub(super) fn paths(&self, prefix: &str) -> Vec<String> {
        let paths = self.fields.iter().flat_map(|(name, fields)| {
            let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            let inner = if fields.is_list { Vec::new() } else { fields.paths(&path) };
            std::iter::once(path).chain(inner)
        });
        paths.collect()
    }

    /// Changes the objects at `place`, of each type.
    fn change(&mut self, place: &str, change: &mut dyn FnMut(&mut Self)) {
        let Some((field, rest)) = place.split_once('.').or_else(|| (!place.is_empty()).then_some((place, ""))) else {
            change(self);
            return self.by_type.values_mut().for_each(change);
        };
        for object in
            std::iter::once(&mut self.fields).chain(self.by_type.values_mut().map(|object| &mut object.fields))
        {
            if let Some(value) = object.get_mut(field) {
                value.change(rest, change);
            }
        }
    }

    /// Adds the fields of another object that may be in the same place.
    fn merge(&mut self, other: Self) {
        self.is_open |= other.is_open;
        self.is_list |= other.is_list;
        for (kind, object) in other.by_type {
            match self.by_type.get_mut(&kind) {
                Some(known) => known.merge(object),
                None => drop(self.by_type.insert(kind, object)),
            }
        }
        for (name, value) in other.fields {
            match self.fields.get_mut(&name) {
                // One of them may be anything.
                Some(known) if known.is_any() || value.is_any() => *known = Self::default(),
                Some(known) => known.merge(value),
                None => drop(self.fields.insert(name, value)),
            }
        }
    }
}

type Components = HashMap<String, RefOr<Schema>>;

/// `None`: a value of this schema is no object.
fn fields(schema: &RefOr<Schema>, components: &Components, depth: usize) -> Option<KnownFields> {
    let (parts, are_alternatives) = match resolved(schema, components)? {
        Schema::Object(object) => return of_object(object, components, depth),
        Schema::Array(array) => {
            let ArrayItems::RefOrSchema(items) = &array.items else { return None };
            return fields(items, components, depth).map(|items| KnownFields { is_list: true, ..items });
        }
        Schema::AllOf(all) => (&all.items, false),
        Schema::OneOf(one) => (&one.items, true),
        Schema::AnyOf(any) => (&any.items, true),
        _ => return None,
    };
    let found = parts.iter().filter_map(|part| Some((types(part, components), fields(part, components, depth)?)));
    let parts: Vec<_> = found.collect();
    if let Some((_, any)) = parts.iter().find(|(_, part)| part.is_any()) {
        return Some(any.clone());
    }
    let have_types = are_alternatives && parts.len() > 1 && parts.iter().all(|(types, _)| !types.is_empty());
    let mut merged: Option<KnownFields> = None;
    for (types, mut part) in parts {
        if have_types {
            part.by_type = types.into_iter().map(|kind| (kind, part.clone())).collect();
        }
        match &mut merged {
            Some(merged) => merged.merge(part),
            None => merged = Some(part),
        }
    }
    merged
}

/// The values of the field `type` in objects of this schema, if they are listed.
fn types(schema: &RefOr<Schema>, components: &Components) -> Vec<String> {
    match resolved(schema, components) {
        Some(Schema::Object(object)) => match object.properties.get(TYPE).and_then(|kind| resolved(kind, components)) {
            Some(Schema::Object(kind)) => {
                let values = kind.enum_values.iter().flatten();
                values.filter_map(|value| value.as_str().map(str::to_owned)).collect()
            }
            _ => Vec::new(),
        },
        Some(Schema::AllOf(all)) => all.items.iter().flat_map(|part| types(part, components)).collect(),
        _ => Vec::new(),
    }
}

fn resolved<'a>(schema: &'a RefOr<Schema>, components: &'a Components) -> Option<&'a Schema> {
    match schema {
        RefOr::Ref(Ref { ref_location, .. }) => {
            let name = ref_location.rsplit('/').next().unwrap_or_default();
            components.get(name).and_then(|schema| resolved(schema, components))
        }
        RefOr::T(schema) => Some(schema),
    }
}

fn of_object(object: &Object, components: &Components, depth: usize) -> Option<KnownFields> {
    let is_open =
        !matches!(object.additional_properties.as_deref(), None | Some(AdditionalProperties::FreeForm(false)));
    if object.properties.is_empty() || depth == 0 {
        let is_object = serde_json::to_value(&object.schema_type).is_ok_and(|kind| kind.to_string().contains("object"));
        return (is_open || is_object || depth == 0).then(KnownFields::default);
    }
    let field = |(name, schema): (&String, &RefOr<Schema>)| {
        (name.clone(), fields(schema, components, depth - 1).unwrap_or_default())
    };
    Some(KnownFields { fields: object.properties.iter().map(field).collect(), is_open, ..KnownFields::default() })
}
