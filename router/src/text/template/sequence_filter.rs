//! Jinja's filters over sequences, with Python's types and order: several of them return generators.

use std::cmp::Ordering;

use minijinja::value::{Kwargs, Rest};
use minijinja::{Environment, Error, State, Value};

use super::operator;
use super::python_value::{self, Generator, SequenceKind, Type, invalid, items, sequence};
use super::{method, python_str};

pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_filter("list", |value: &Value| items(value).map(Value::from));
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("join", join);
    environment.add_filter("sum", sum);
    environment.add_filter("map", map);
    for (name, is_rejected) in [("select", false), ("reject", true)] {
        environment.add_filter(name, move |state: &State<'_, '_>, value: &Value, arguments: Rest<Value>| {
            choose(state, value, is_rejected, None, &arguments)
        });
    }
    for (name, is_rejected) in [("selectattr", false), ("rejectattr", true)] {
        environment.add_filter(
            name,
            move |state: &State<'_, '_>, value: &Value, path: &Value, arguments: Rest<Value>| {
                choose(state, value, is_rejected, Some(path), &arguments)
            },
        );
    }
    environment.add_filter("first", |value: &Value| match value.downcast_object_ref::<Generator>() {
        Some(generator) => Ok::<_, Error>(generator.next().unwrap_or_default()),
        None => items(value).map(|items| items.into_iter().next().unwrap_or_default()),
    });
    environment.add_filter("last", |value: &Value| match Type::of(value) {
        Type::Generator => Err(invalid("last: a generator has no last item")),
        _ => items(value).map(|items| items.into_iter().next_back().unwrap_or_default()),
    });
    environment.add_filter("reverse", |value: &Value| match Type::of(value) {
        Type::Str => Ok(Value::from(value.as_str().unwrap_or_default().chars().rev().collect::<String>())),
        Type::Generator => Ok(Value::from(items(value)?.into_iter().rev().collect::<Vec<_>>())),
        _ => items(value).map(|items| Generator::value(items.into_iter().rev().collect())),
    });
    environment.add_filter("sort", |value: &Value, arguments: Rest<Value>, options: Kwargs| {
        let keys = Keys::new(&arguments, &options, ["reverse", "case_sensitive", "attribute"])?;
        keys.sorted(items(value)?).map(Value::from)
    });
    environment.add_filter("unique", unique);
    environment.add_filter("min", |value: &Value, arguments: Rest<Value>, options: Kwargs| {
        extreme(value, &arguments, &options, Ordering::Less)
    });
    environment.add_filter("max", |value: &Value, arguments: Rest<Value>, options: Kwargs| {
        extreme(value, &arguments, &options, Ordering::Greater)
    });
    environment.add_filter("groupby", group_by);
    environment.add_filter("batch", batch);
    environment.add_filter("slice", slice);
    environment.add_filter("items", |value: &Value| match Type::of(value) {
        Type::Dict => Ok(Generator::value(method::items(value))),
        Type::Undefined => Ok(Generator::value(Vec::new())),
        kind => Err(invalid(format!("items: a value of type {} has no items", kind.name()))),
    });
    environment.add_filter("dictsort", dict_sort);
    // Its result differs from call to call.
    environment.remove_filter("random");
}

/// The argument of a filter, by its position or by its name.
fn argument(arguments: &[Value], index: usize, options: &Kwargs, name: &str) -> Result<Option<Value>, Error> {
    let named = options.get::<Option<Value>>(name)?;
    Ok(arguments.get(index).cloned().or(named))
}

fn no_more(filter: &str, arguments: &[Value], most: usize, options: &Kwargs) -> Result<(), Error> {
    options.assert_all_used()?;
    if arguments.len() > most {
        return Err(invalid(format!("{filter} takes at most {most} arguments")));
    }
    Ok(())
}

fn length(value: &Value) -> Result<usize, Error> {
    let kind = Type::of(value);
    if kind.is_iterable() && kind != Type::Generator {
        return Ok(value.len().unwrap_or(0));
    }
    Err(invalid(format!("a value of type {} has no length", kind.name())))
}

/// The item that a path such as `a.0.b` leads to.
fn at_path(value: &Value, path: &Value, default: Option<&Value>) -> Result<Value, Error> {
    let Some(path) = path.as_str() else { return operator::item(value, path) };
    let mut found = value.clone();
    for part in path.split('.') {
        let part = part.parse::<u32>().map_or_else(|_| Value::from(part), Value::from);
        found = operator::item(&found, &part)?;
        if let Some(default) = default.filter(|_| found.is_undefined()) {
            found = default.clone();
        }
    }
    Ok(found)
}

fn join(value: &Value, arguments: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let separator = argument(&arguments, 0, &options, "d")?.map_or(Ok(String::new()), |text| python_str::str(&text))?;
    let path = argument(&arguments, 1, &options, "attribute")?;
    no_more("join", &arguments, 2, &options)?;
    let text = |item: &Value| match &path {
        Some(path) => python_str::str(&at_path(item, path, None)?),
        None => python_str::str(item),
    };
    Ok(items(value)?.iter().map(text).collect::<Result<Vec<_>, _>>()?.join(&separator))
}

fn sum(value: &Value, arguments: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let path = argument(&arguments, 0, &options, "attribute")?.filter(|path| !path.is_none());
    let start = argument(&arguments, 1, &options, "start")?.unwrap_or_else(|| Value::from(0));
    no_more("sum", &arguments, 2, &options)?;
    if Type::of(&start) == Type::Str {
        return Err(invalid("sum cannot add texts; use join"));
    }
    items(value)?.iter().try_fold(start, |sum, item| match &path {
        Some(path) => operator::add(&sum, &at_path(item, path, None)?),
        None => operator::add(&sum, item),
    })
}

fn map(state: &State<'_, '_>, value: &Value, arguments: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let items = if value.is_true() { items(value)? } else { Vec::new() };
    let mapped: Result<Vec<_>, _> = if let Some(name) = arguments.first() {
        let name = name.as_str().ok_or_else(|| invalid("map takes the name of a filter"))?;
        let more: Vec<_> =
            options.args().map(|option| Ok((option, options.get::<Value>(option)?))).collect::<Result<_, Error>>()?;
        let more = (!more.is_empty()).then(|| Value::from(more.into_iter().collect::<Kwargs>()));
        let call = |item| [&[item], &arguments[1..], more.as_slice()].concat();
        items.into_iter().map(|item| state.apply_filter(name, &call(item))).collect()
    } else {
        let path =
            options.get::<Option<Value>>("attribute")?.ok_or_else(|| invalid("map requires a filter argument"))?;
        let default = options.get::<Option<Value>>("default")?;
        options.assert_all_used()?;
        items.iter().map(|item| at_path(item, &path, default.as_ref())).collect()
    };
    mapped.map(Generator::value)
}

/// The items that pass a test, or that do not.
fn choose(
    state: &State<'_, '_>,
    value: &Value,
    is_rejected: bool,
    path: Option<&Value>,
    arguments: &[Value],
) -> Result<Value, Error> {
    let items = if value.is_true() { items(value)? } else { Vec::new() };
    let mut chosen = Vec::new();
    for item in items {
        let tested = path.map_or_else(|| Ok(item.clone()), |path| at_path(&item, path, None))?;
        let passes = match arguments.split_first() {
            Some((test, more)) => {
                let test = test.as_str().ok_or_else(|| invalid("the name of a test must be a text"))?;
                state.perform_test(test, &[&[tested], more].concat())?
            }
            None => tested.is_true(),
        };
        if passes != is_rejected {
            chosen.push(item);
        }
    }
    Ok(Generator::value(chosen))
}

/// The keys by which a filter orders or compares items.
struct Keys {
    paths: Vec<Value>,
    case_sensitive: bool,
    reverse: bool,
}

impl Keys {
    /// `names`: of the filter's parameters, in their order.
    fn new<const N: usize>(arguments: &[Value], options: &Kwargs, names: [&str; N]) -> Result<Self, Error> {
        let mut keys = Self { paths: Vec::new(), case_sensitive: false, reverse: false };
        for (index, name) in names.into_iter().enumerate() {
            let Some(value) = argument(arguments, index, options, name)? else { continue };
            match (name, value.as_str()) {
                ("reverse", _) => keys.reverse = value.is_true(),
                ("case_sensitive", _) => keys.case_sensitive = value.is_true(),
                (_, Some(paths)) => keys.paths = paths.split(',').map(Value::from).collect(),
                (_, None) if value.is_none() => {}
                (_, None) => keys.paths = vec![value],
            }
        }
        no_more("the filter", arguments, N, options)?;
        Ok(keys)
    }

    fn folded(&self, value: Value) -> Value {
        match value.as_str() {
            Some(text) if !self.case_sensitive => Value::from(text.to_lowercase()),
            _ => value,
        }
    }

    fn key(&self, item: &Value) -> Result<Value, Error> {
        match &self.paths[..] {
            [] => Ok(self.folded(item.clone())),
            [path] => at_path(item, path, None).map(|value| self.folded(value)),
            paths => {
                let parts = paths.iter().map(|path| at_path(item, path, None).map(|value| self.folded(value)));
                parts.collect::<Result<Vec<_>, _>>().map(Value::from)
            }
        }
    }

    /// Items with equal keys keep their order.
    fn sorted(&self, items: Vec<Value>) -> Result<Vec<Value>, Error> {
        let keyed = items.into_iter().map(|item| Ok((self.key(&item)?, item))).collect::<Result<Vec<_>, Error>>()?;
        Ok(sorted_by_key(keyed, self.reverse)?.into_iter().map(|(_, item)| item).collect())
    }
}

fn sorted_by_key(mut keyed: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<(Value, Value)>, Error> {
    let mut failure = None;
    keyed.sort_by(|(a, _), (b, _)| {
        let ordering = python_value::compare(a, b).unwrap_or_else(|error| {
            failure.get_or_insert(error);
            None
        });
        let ordering = ordering.unwrap_or(Ordering::Equal);
        if reverse { ordering.reverse() } else { ordering }
    });
    failure.map_or(Ok(keyed), Err)
}

fn unique(value: &Value, arguments: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let keys = Keys::new(&arguments, &options, ["case_sensitive", "attribute"])?;
    let (mut seen, mut chosen): (Vec<Value>, _) = (Vec::new(), Vec::new());
    for item in items(value)? {
        let key = keys.key(&item)?;
        operator::check_hashable(&key)?;
        if !seen.iter().any(|other| python_value::equals(other, &key)) {
            seen.push(key);
            chosen.push(item);
        }
    }
    Ok(Generator::value(chosen))
}

fn extreme(value: &Value, arguments: &[Value], options: &Kwargs, wanted: Ordering) -> Result<Value, Error> {
    let keys = Keys::new(arguments, options, ["case_sensitive", "attribute"])?;
    let mut best: Option<(Value, Value)> = None;
    for item in items(value)? {
        let key = keys.key(&item)?;
        let is_better = best.as_ref().map_or(Ok(true), |(other, _)| {
            python_value::compare(&key, other).map(|ordering| ordering == Some(wanted))
        })?;
        if is_better {
            best = Some((key, item));
        }
    }
    Ok(best.map(|(_, item)| item).unwrap_or_default())
}

fn group_by(value: &Value, path: &Value, arguments: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = argument(&arguments, 0, &options, "default")?;
    let case_sensitive = argument(&arguments, 1, &options, "case_sensitive")?.is_some_and(|flag| flag.is_true());
    no_more("groupby", &arguments, 2, &options)?;
    let keys = Keys { paths: Vec::new(), case_sensitive, reverse: false };
    let keyed = items(value)?.into_iter().map(|item| Ok((keys.folded(at_path(&item, path, default.as_ref())?), item)));
    let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
    for (key, item) in sorted_by_key(keyed.collect::<Result<_, Error>>()?, false)? {
        match groups.last_mut().filter(|(last, _)| python_value::equals(last, &key)) {
            Some((_, group)) => group.push(item),
            None => groups.push((key, vec![item])),
        }
    }
    let group = |(key, group): (Value, Vec<Value>)| {
        let key = if case_sensitive { key } else { at_path(&group[0], path, default.as_ref())? };
        Ok(sequence(SequenceKind::Group, vec![key, Value::from(group)]))
    };
    groups.into_iter().map(group).collect::<Result<Vec<_>, Error>>().map(Value::from)
}

fn batch(value: &Value, size: usize, fill: Option<Value>) -> Result<Value, Error> {
    if size == 0 {
        return Err(invalid("batch: the size must be at least 1"));
    }
    let mut batches: Vec<Vec<Value>> = items(value)?.chunks(size).map(<[Value]>::to_vec).collect();
    if let (Some(last), Some(fill)) = (batches.last_mut(), fill.filter(|fill| !fill.is_none())) {
        last.resize(size, fill);
    }
    Ok(Generator::value(batches.into_iter().map(Value::from).collect()))
}

fn slice(value: &Value, num_slices: usize, fill: Option<Value>) -> Result<Value, Error> {
    let items = items(value)?;
    if num_slices == 0 || num_slices > operator::MAX_RANGE {
        return Err(invalid(format!("slice: {num_slices} slices, from 1 to {} are allowed", operator::MAX_RANGE)));
    }
    let (size, num_longer) = (items.len() / num_slices, items.len() % num_slices);
    let mut rest = items.into_iter();
    let slices = (0..num_slices).map(|index| {
        let is_longer = index < num_longer;
        let mut slice: Vec<_> = rest.by_ref().take(size + usize::from(is_longer)).collect();
        slice.extend(fill.clone().filter(|fill| !fill.is_none() && !is_longer));
        Value::from(slice)
    });
    Ok(Generator::value(slices.collect()))
}

fn dict_sort(value: &Value, arguments: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let case_sensitive = argument(&arguments, 0, &options, "case_sensitive")?.is_some_and(|flag| flag.is_true());
    let by = argument(&arguments, 1, &options, "by")?.unwrap_or_else(|| Value::from("key"));
    let reverse = argument(&arguments, 2, &options, "reverse")?.is_some_and(|flag| flag.is_true());
    no_more("dictsort", &arguments, 3, &options)?;
    let index = match by.as_str() {
        Some("key") => 0,
        Some("value") => 1,
        _ => return Err(invalid("dictsort: by must be \"key\" or \"value\"")),
    };
    if Type::of(value) != Type::Dict {
        return Err(invalid(format!("dictsort takes no value of type {}", Type::of(value).name())));
    }
    let keys = Keys { paths: Vec::new(), case_sensitive, reverse };
    let keyed = method::items(value)
        .into_iter()
        .map(|pair| (keys.folded(pair.get_item_by_index(index).unwrap_or_default()), pair));
    Ok(sorted_by_key(keyed.collect(), reverse)?.into_iter().map(|(_, pair)| pair).collect())
}
