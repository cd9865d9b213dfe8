//! Finds the folders of `--lora-adapters`: in the file system, or on the hub, from which they are downloaded with the model.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use penstock_router::config::{AdapterConfig, AdapterSource};
use penstock_router::{AdapterPlace as Place, is_hub_id};

use crate::flag::args::Args;

/// The file that makes a folder an adapter.
const CONFIG: &str = "adapter_config.json";

/// Why a value of `--lora-adapters` cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AdapterFlagError {
    #[error("--lora-adapters has {given:?}, must be NAME=FOLDER, FOLDER, or the id of an adapter on the hub")]
    Malformed { given: String },
    #[error("--lora-adapters: {} is not an adapter: it has no {CONFIG}", .folder.display())]
    NotAnAdapter { folder: PathBuf },
    #[error("--lora-adapters has two adapters with the name {0:?}; give one of them another: NAME=FOLDER")]
    TwoOfOneName(String),
    #[error("--lora-adapters has an adapter with the name {0:?}, which is the model's; give it another: NAME=FOLDER")]
    NameOfModel(String),
}

/// The values of `--lora-adapters`, and what goes with them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AdapterFlags {
    named: Vec<(String, Place)>,
    /// Adapters that are loaded at a time.
    pub(crate) max_loaded: usize,
    can_change: bool,
}

impl AdapterFlags {
    pub(crate) fn new(args: &Args) -> Result<Self, AdapterFlagError> {
        let given = args.lora_adapters.iter().map(|given| given.trim()).filter(|given| !given.is_empty());
        let named = given.map(named).collect::<Result<Vec<_>, _>>()?;
        let mut names = HashSet::new();
        if let Some((twice, _)) = named.iter().find(|(name, _)| !names.insert(name)) {
            return Err(AdapterFlagError::TwoOfOneName(twice.clone()));
        }
        let served = if args.served_model_name.is_empty() { args.model_id.as_slice() } else { &args.served_model_name };
        // No request could name the model.
        if let Some((name, _)) = named.iter().find(|(name, _)| served.contains(name)) {
            return Err(AdapterFlagError::NameOfModel(name.clone()));
        }
        let max_slots = args.max_lora_slots as usize;
        let max_loaded = if args.enable_lora_updates { max_slots } else { named.len().min(max_slots) };
        Ok(Self { named, max_loaded, can_change: args.enable_lora_updates })
    }

    /// The adapters to download, as `ID` or `ID@REVISION`.
    pub(crate) fn on_hub(&self) -> impl Iterator<Item = &str> {
        self.named.iter().filter_map(|(_, place)| match place {
            Place::Folder(_) => None,
            Place::Hub(given) => Some(given.as_str()),
        })
    }

    /// The adapters to serve. `downloaded`: the folders of `on_hub`.
    pub(crate) fn config(&self, downloaded: &HashMap<String, PathBuf>) -> AdapterConfig {
        let sources = self.named.iter().map(|(name, place)| {
            let path = match place {
                Place::Folder(path) => path.clone(),
                Place::Hub(given) => downloaded.get(given).cloned().unwrap_or_default(),
            };
            AdapterSource { name: name.clone(), path }
        });
        AdapterConfig { sources: sources.collect(), max_loaded: self.max_loaded, can_change: self.can_change }
    }
}

/// COMPAT: TGI's syntax, `id`, `id@revision`, `name=/path` and `name=/path@revision`. A folder has no revisions, so there the
/// part behind `@` is part of the path.
fn named(given: &str) -> Result<(String, Place), AdapterFlagError> {
    let (name, place) = given.split_once('=').unwrap_or((given, given));
    if name.is_empty() || place.is_empty() {
        return Err(AdapterFlagError::Malformed { given: given.to_owned() });
    }
    let folder = Path::new(place);
    let place = match std::fs::canonicalize(folder) {
        Ok(path) if path.join(CONFIG).is_file() => Place::Folder(path),
        Ok(folder) => return Err(AdapterFlagError::NotAnAdapter { folder }),
        Err(_) if given.contains('=') => {
            return Err(AdapterFlagError::NotAnAdapter { folder: folder.to_owned() });
        }
        Err(_) if is_hub_id(place) => Place::Hub(place.to_owned()),
        Err(_) => return Err(AdapterFlagError::Malformed { given: given.to_owned() }),
    };
    let name = if given.contains('=') { name } else { name.split_once('@').map_or(name, |(id, _)| id) };
    Ok((name.to_owned(), place))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn adapter_in(folder: PathBuf) -> PathBuf {
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(CONFIG), "{}").unwrap();
        std::fs::canonicalize(folder).unwrap()
    }

    fn read(arguments: &[&str]) -> Result<AdapterFlags, AdapterFlagError> {
        AdapterFlags::new(&Args::parse_from([&["penstock"], arguments].concat()))
    }

    #[test]
    fn adapters_are_named_folders_or_ids_on_the_hub() {
        let root = tempfile::tempdir().unwrap();
        let folder = adapter_in(root.path().join("some@folder"));
        let given = format!("sql={}, owner/name,owner/other@def,{}", folder.display(), folder.display());
        let flags = read(&["--lora-adapters", &given]).unwrap();
        assert_eq!(flags.on_hub().collect::<Vec<_>>(), ["owner/name", "owner/other@def"]);
        let [name, other] = ["/cache/name", "/cache/other"].map(PathBuf::from);
        let downloaded = [("owner/name".to_owned(), name.clone()), ("owner/other@def".to_owned(), other.clone())];
        let config = flags.config(&downloaded.into());
        let found: Vec<_> = config.sources.iter().map(|source| (source.name.as_str(), &source.path)).collect();
        let typed = folder.display().to_string();
        // A folder's name may contain what separates a revision.
        let typed = typed.split_once('@').map_or(typed.as_str(), |(name, _)| name).to_owned();
        let expected = [("sql", &folder), ("owner/name", &name), ("owner/other", &other), (typed.as_str(), &folder)];
        assert_eq!(found, expected);
        assert_eq!((config.max_loaded, config.can_change), (4, false));
    }

    #[test]
    fn what_is_not_an_adapter_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let folder = adapter_in(root.path().join("a"));
        let plain = root.path().join("plain");
        std::fs::create_dir(&plain).unwrap();
        let refused = |value: &str| read(&["--lora-adapters", value]).unwrap_err().to_string();
        assert!(refused(&format!("x={}", plain.display())).contains("has no adapter_config.json"));
        assert!(refused("x=/nowhere").contains("/nowhere is not an adapter"));
        for malformed in ["=/a", "a=", "../../etc", "a/b/c", "owner/name@../x"] {
            assert!(refused(malformed).contains("must be NAME=FOLDER"), "{malformed}");
        }
        let twice = format!("x={0},x={0}", folder.display());
        assert!(refused(&twice).contains("two adapters with the name \"x\""));
        let of_model = Err(AdapterFlagError::NameOfModel("owner/name".to_owned()));
        let arguments = ["--lora-adapters", "owner/name", "--model-id", "owner/name"];
        assert_eq!(read(&arguments), of_model);
        let served = ["--served-model-name", "base,owner/name"];
        assert_eq!(read(&[&arguments[..2], &served[..]].concat()), of_model);
        assert!(read(&[&arguments[..], &["--served-model-name", "base"]].concat()).is_ok());
    }

    #[test]
    fn adapters_take_slots_only_if_there_may_be_some() {
        assert_eq!(read(&[]).unwrap().config(&HashMap::new()), AdapterConfig::default());
        let flags = read(&["--enable-lora-updates", "--max-lora-slots", "5"]).unwrap();
        assert_eq!(flags.config(&HashMap::new()), AdapterConfig { sources: vec![], max_loaded: 5, can_change: true });
    }
}
