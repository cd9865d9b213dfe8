//! The number of ranks of a pipeline stage with `--ranks-on`.

use super::{Choice, ResolveError};
use crate::flag::args::Args;
use crate::flag::isa::CpuIsa;
use crate::flag::ranks_on::RanksOn;

/// Each node has equally many ranks of all stages.
pub(super) fn num_shards(args: &Args, choices: &mut Vec<Choice>) -> Result<usize, ResolveError> {
    let (num_nodes, num_stages) = (args.ranks_on.len(), args.pipeline_parallel_size as usize);
    let refused = |name, value, allowed| Err(ResolveError::OutOfRange { name, value, allowed });
    if args.replicas > 1 {
        return refused(
            "replicas",
            args.replicas.to_string(),
            "1 with --ranks-on; use `penstock route` for several servers",
        );
    }
    if args.ranks_on.iter().enumerate().any(|(index, node)| args.ranks_on[..index].contains(node)) {
        return refused("ranks-on", join(&args.ranks_on), "each node once; raise --num-shard for more ranks on each");
    }
    if args.engine_listen.is_some() && args.cpu_isa == CpuIsa::Auto && !args.unencrypted_gpus {
        return refused(
            "cpu-isa",
            "auto".to_owned(),
            "an instruction set that all nodes have, with --ranks-on and --engine-listen: a router joins only servers with \
             the same one, and this server does not know its nodes' CPUs",
        );
    }
    if args.ranks_on.iter().any(|host| host.node().is_none()) {
        return num_shards_on_ray(args);
    }
    let are_equally_many = |num_shard: usize| (num_shard * num_stages).is_multiple_of(num_nodes);
    match args.num_shard {
        Some(num_shard) if !are_equally_many(num_shard) => refused(
            "num-shard",
            num_shard.to_string(),
            "such that it, times --pipeline-parallel-size, is a multiple of the number of nodes of --ranks-on",
        ),
        Some(num_shard) => Ok(num_shard),
        None => {
            let fewest = (1..num_nodes).find(|num_shard| are_equally_many(*num_shard)).unwrap_or(num_nodes);
            choices.push(Choice::new("num-shard", fewest, "the fewest with which each node has equally many ranks"));
            Ok(fewest)
        }
    }
}

/// The given number of shards, because only Ray knows the cluster.
fn num_shards_on_ray(args: &Args) -> Result<usize, ResolveError> {
    let refused = |name, value, allowed| Err(ResolveError::OutOfRange { name, value, allowed });
    if args.ranks_on.len() > 1 {
        return refused("ranks-on", join(&args.ranks_on), "one ray://HOST:PORT, or nodes only");
    }
    if let Some(file) = &args.node_secret_file {
        return refused(
            "node-secret-file",
            file.display().to_string(),
            "unset with ray://: each server makes a secret",
        );
    }
    match args.num_shard {
        Some(num_shard) => Ok(num_shard),
        None => refused("num-shard", "unset".to_owned(), "the number of ranks of a stage with --ranks-on ray://…"),
    }
}

fn join(nodes: &[RanksOn]) -> String {
    nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}
