//! The modules of the launcher import each other in one direction: neither the rooms nor the files have a cycle.
//!
//! `super::` does not count: a room and its files are one module tree.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Imported modules by the module that imports them. A module is a path such as `worker::group`.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Adds the imports of every file below `folder`, whose module is `module`.
fn read(folder: &Path, module: &str, imports: &mut Imports) {
    for entry in fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable folder").path();
        let stem = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let name = match stem.as_str() {
            "main" => continue, // It starts everything and is imported by nothing.
            "mod" => module.to_owned(),
            _ => format!("{module}::{stem}").trim_start_matches("::").to_owned(),
        };
        if path.is_dir() {
            read(&path, &name, imports);
        } else {
            let text = fs::read_to_string(&path).expect("a readable file");
            imports.entry(name).or_default().extend(text.split("crate::").skip(1).flat_map(imported));
        }
    }
}

/// The paths that a file names after `crate::`, such as `worker::group` of `worker::{group, host::Hosts}`.
fn imported(text: &str) -> Vec<String> {
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let (head, rest) = text.split_at(text.find(|c| !is_path(c)).unwrap_or(text.len()));
    match rest.strip_prefix('{').and_then(|list| list.split_once('}')) {
        Some((list, _)) => list.split(',').map(|item| format!("{head}{}", item.trim())).collect(),
        None => vec![head.to_owned()],
    }
}

/// The graph with modules cut to `depth` names, and to names of modules: `worker::group::Recipe` is in `worker::group`.
fn cut(imports: &Imports, depth: usize) -> Imports {
    let known: BTreeSet<String> = imports.keys().map(|module| first_names(module, depth)).collect();
    let module_of = |path: &str| (1..=depth).rev().map(|n| first_names(path, n)).find(|name| known.contains(name));
    let mut graph = Imports::new();
    for (module, paths) in imports {
        let from = first_names(module, depth);
        let to: Vec<_> = paths.iter().filter_map(|path| module_of(path)).filter(|to| *to != from).collect();
        graph.entry(from).or_default().extend(to);
    }
    graph
}

fn first_names(path: &str, count: usize) -> String {
    path.split("::").take(count).collect::<Vec<_>>().join("::")
}

/// What is left when modules that import nothing, or that nothing imports, are removed again and again.
fn with_cycles(mut graph: Imports) -> Imports {
    loop {
        let num_modules = graph.len();
        let imported: BTreeSet<String> = graph.values().flatten().cloned().collect();
        graph.retain(|from, to| !to.is_empty() && imported.contains(from));
        let left: BTreeSet<String> = graph.keys().cloned().collect();
        graph.values_mut().for_each(|to| to.retain(|name| left.contains(name)));
        if graph.len() == num_modules {
            return graph;
        }
    }
}

#[test]
fn no_room_and_no_file_is_part_of_a_cycle_of_imports() {
    let mut imports = Imports::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), "", &mut imports);
    for depth in [1, 2] {
        let graph = cut(&imports, depth);
        assert!(graph.values().map(BTreeSet::len).sum::<usize>() > 20, "imports are not found: {graph:?}");
        let cyclic = with_cycles(graph);
        assert!(cyclic.is_empty(), "these modules import each other: {cyclic:#?}");
    }
}
