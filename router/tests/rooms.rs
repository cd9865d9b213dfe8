//! ARCHITECTURE.md's rooms: which modules of the router may use which, and which packages they may not.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use regex::Regex;

/// A room, the rooms that it may use, and the packages that it must not.
struct Room {
    name: &'static str,
    uses: &'static [&'static str],
    must_not_use: &'static [&'static str],
}

const fn room(name: &'static str, uses: &'static [&'static str], must_not_use: &'static [&'static str]) -> Room {
    Room { name, uses, must_not_use }
}

const HTTP: &str = "axum";
const PROTOCOL: &str = "penstock_proto";
const TEMPLATES: &str = "minijinja";
const GRPC: &str = "tonic";
const RUNTIME: &str = "tokio";

/// From the bottom up: a room uses only rooms above its line, so that there is no circle.
const ROOMS: &[Room] = &[
    room("limits", &[], &[HTTP, PROTOCOL, GRPC, RUNTIME]),
    room("sequence", &[], &[HTTP, GRPC, RUNTIME]),
    room("tls", &[], &[HTTP, PROTOCOL]),
    room("config", &["limits", "sequence"], &[PROTOCOL, GRPC]),
    room("generator", &["sequence"], &[HTTP, PROTOCOL, GRPC]),
    room("text", &["sequence"], &[HTTP, PROTOCOL, GRPC]),
    room("telemetry", &["config", "generator", "limits", "sequence"], &[PROTOCOL, GRPC]),
    room("fetch", &["config", "telemetry"], &[PROTOCOL, GRPC]),
    room("worker", &["sequence", "tls"], &[HTTP]),
    room("remote", &["config", "generator", "sequence", "tls", "worker"], &[]),
    room("engine", &["generator", "remote", "sequence", "telemetry", "worker"], &[HTTP, PROTOCOL, GRPC]),
    room("replica", &["engine", "generator", "remote", "sequence", "worker"], &[HTTP, PROTOCOL, GRPC]),
    room(
        "generation",
        &["config", "fetch", "generator", "limits", "sequence", "telemetry", "text"],
        &[HTTP, "hyper", "hyper_util", PROTOCOL, GRPC],
    ),
    room("engine_server", &["config", "generation", "generator", "remote", "sequence"], &[HTTP]),
    room(
        "api",
        &["config", "generation", "limits", "sequence", "telemetry", "text"],
        &["hyper", "hyper_util", PROTOCOL, GRPC, RUNTIME],
    ),
    room(
        "http",
        &["api", "config", "generation", "generator", "limits", "sequence", "telemetry", "text"],
        &[PROTOCOL, GRPC],
    ),
    room("serve", &["config", "generation", "generator", "http", "telemetry", "text"], &[HTTP, PROTOCOL, GRPC]),
];

/// Minijinja is confined to this folder.
const TEMPLATE_FOLDER: &str = "text/template";

/// A module, as its path from the root of the crate.
type Module = Vec<String>;

/// A module's own code: without comments, and without tests.
struct Source {
    file: PathBuf,
    text: String,
    /// What each `use` names, and whether it is `pub`.
    imports: Vec<(Module, bool)>,
    /// Paths in the rest that begin with `crate` or `super`.
    paths: Vec<Module>,
}

fn sources() -> BTreeMap<Module, Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    let name = |path: &Path| path.strip_prefix(&root).unwrap().with_extension("").to_string_lossy().into_owned();
    let is_own = |name: &str| !name.ends_with("tests") && name != "lib" && !name.starts_with("bin/");
    let own = files.into_iter().filter(|path| is_own(&name(path)));
    own.map(|path| {
        let name = name(&path);
        let module = name.trim_end_matches("/mod").split('/').map(str::to_owned).collect();
        (module, source(&path))
    })
    .collect()
}

static IMPORT: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(?m)^ *(pub(?:\([^)]*\))? )?use ([\w:{},*\s]+);").unwrap());
static PATH: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\b(?:crate|super)(?:::\w+)+").unwrap());

fn source(file: &Path) -> Source {
    let text = fs::read_to_string(file).unwrap();
    let text = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n");
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default().to_owned();
    let imports = IMPORT.captures_iter(&text).flat_map(|import| {
        let is_public = import.get(1).is_some();
        let tree = import[2].split_whitespace().collect::<Vec<_>>().join(" ");
        expanded(&tree).into_iter().map(move |path| (path, is_public))
    });
    let rest = IMPORT.replace_all(&text, "");
    let paths = PATH.find_iter(&rest).map(|path| segments(path.as_str())).collect();
    Source { file: file.to_owned(), imports: imports.collect(), paths, text: text.clone() }
}

fn segments(path: &str) -> Module {
    path.split("::").map(|segment| segment.trim().to_owned()).collect()
}

/// The paths of `a::{b, c::d}`, without the new names that `as` gives.
fn expanded(tree: &str) -> Vec<Module> {
    let Some((prefix, rest)) = tree.split_once('{') else {
        return vec![segments(tree.split(" as ").next().unwrap_or(tree))];
    };
    let inner = &rest[..rest.rfind('}').unwrap()];
    let mut depth = 0;
    let branches = inner.split(|char| {
        depth += i32::from(char == '{') - i32::from(char == '}');
        char == ',' && depth == 0
    });
    let branches = branches.map(str::trim).filter(|branch| !branch.is_empty());
    branches.flat_map(|branch| expanded(&format!("{prefix}{branch}"))).collect()
}

/// The module that a path in `from` leads to; `None`: it leads out of the crate. Follows `pub use`.
fn resolve(sources: &BTreeMap<Module, Source>, from: &[String], path: &[String], depth: usize) -> Option<Module> {
    let mut module = from.to_vec();
    let mut rest = path;
    while let [first, others @ ..] = rest {
        match first.as_str() {
            "crate" => module.clear(),
            "super" => drop(module.pop()),
            "self" => {}
            _ => break,
        }
        rest = others;
    }
    let is_absolute = rest.len() < path.len();
    while let [first, others @ ..] = rest
        && sources.contains_key(&[&module[..], std::slice::from_ref(first)].concat())
    {
        module.push(first.clone());
        rest = others;
    }
    let is_found = is_absolute || module.len() > from.len();
    let exports = sources.get(&module).into_iter().flat_map(|source| &source.imports);
    let exported = exports.filter(|(_, is_public)| *is_public).find(|(path, _)| path.last() == rest.first());
    match exported.filter(|_| is_found && !rest.is_empty() && depth > 0) {
        Some((path, _)) => resolve(sources, &module, path, depth - 1).or(Some(module)),
        None => is_found.then_some(module),
    }
}

/// Each module with those that it uses.
fn arrows(sources: &BTreeMap<Module, Source>) -> BTreeMap<Module, BTreeSet<Module>> {
    let used = |(module, source): (&Module, &Source)| {
        let paths = source.imports.iter().map(|(path, _)| path).chain(&source.paths);
        let used = paths.filter_map(|path| resolve(sources, module, path, 8)).filter(|used| used != module);
        (module.clone(), used.collect())
    };
    sources.iter().map(used).collect()
}

/// The names of modules that use each other, if there are such.
fn circle(arrows: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<String> {
    let mut left = arrows.clone();
    loop {
        let names: BTreeSet<Module> = left.keys().cloned().collect();
        let before = left.len();
        left.retain(|_, used| used.iter().any(|used| names.contains(used)));
        if left.len() == before {
            break;
        }
    }
    // A module that nothing in the rest uses is no part of a circle.
    loop {
        let used: BTreeSet<Module> = left.values().flatten().cloned().collect();
        let before = left.len();
        left.retain(|module, _| used.contains(module));
        if left.len() == before {
            return left.keys().map(|module| module.join("/")).collect();
        }
    }
}

#[test]
fn rooms_use_only_those_below_them() {
    let mut below: Vec<&str> = Vec::new();
    for room in ROOMS {
        let above: Vec<_> = room.uses.iter().filter(|used| !below.contains(used)).collect();
        assert!(above.is_empty(), "`{}` may use {above:?}, which stand above it in the table", room.name);
        below.push(room.name);
    }
    let sources = sources();
    let mut unused: BTreeSet<_> =
        ROOMS.iter().flat_map(|room| room.uses.iter().map(|used| (room.name, *used))).collect();
    for (module, used) in arrows(&sources) {
        let room = ROOMS.iter().find(|room| room.name == module[0]);
        let room = room.unwrap_or_else(|| panic!("the room `{}` is not in the table", module[0]));
        for used in used.iter().filter_map(|used| used.first()).filter(|used| *used != room.name) {
            let file = sources[&module].file.display();
            assert!(room.uses.contains(&used.as_str()), "{file} uses `{used}`, which `{}` must not", room.name);
            unused.retain(|arrow| *arrow != (room.name, used.as_str()));
        }
    }
    assert!(unused.is_empty(), "the table allows {unused:?}, which no file needs");
}

#[test]
fn rooms_do_not_use_the_packages_that_they_must_not_know() {
    let sources = sources();
    let in_room = |room: &str| sources.iter().filter(move |(module, _)| module[0] == room).collect::<Vec<_>>();
    let is_template = |module: &Module| module.join("/").starts_with(TEMPLATE_FOLDER);
    let no_templates = sources.iter().filter(|(module, _)| !is_template(module)).collect();
    let pairs = ROOMS.iter().flat_map(|room| room.must_not_use.iter().map(|package| (*package, in_room(room.name))));
    for (package, modules) in pairs.chain([(TEMPLATES, no_templates)]) {
        let name = format!("{package}::");
        for (_, source) in modules {
            assert!(!source.text.contains(&name), "{} must not use {package}", source.file.display());
        }
    }
}

/// Folders are left out: a folder's `mod.rs` declares its files, and they may use it.
#[test]
fn files_of_a_room_do_not_use_each_other_in_a_circle() {
    let sources = sources();
    let is_folder =
        |module: &Module| sources.keys().any(|other| other.len() > module.len() && other.starts_with(module));
    let mut arrows = arrows(&sources);
    arrows.retain(|module, _| !is_folder(module));
    arrows.iter_mut().for_each(|(module, used)| used.retain(|used| used[0] == module[0]));
    assert_eq!(circle(&arrows), [""; 0], "these files use each other in a circle");
}

#[test]
fn paths_and_circles_are_found() {
    let paths = |tree: &str| -> Vec<String> { expanded(tree).iter().map(|path| path.join("::")).collect() };
    assert_eq!(
        paths("crate::a::{self, b::{c, d as e}, f}"),
        ["crate::a::self", "crate::a::b::c", "crate::a::b::d", "crate::a::f"]
    );
    let module = |name: &str| vec![name.to_owned()];
    let arrows = |pairs: &[(&str, &str)]| {
        let mut arrows: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
        for (from, to) in pairs {
            arrows.entry(module(from)).or_default().insert(module(to));
            arrows.entry(module(to)).or_default();
        }
        arrows
    };
    assert_eq!(circle(&arrows(&[("a", "b"), ("b", "c"), ("a", "c")])), [""; 0]);
    assert_eq!(circle(&arrows(&[("x", "a"), ("a", "b"), ("b", "c"), ("c", "a"), ("c", "y")])), ["a", "b", "c"]);
}
