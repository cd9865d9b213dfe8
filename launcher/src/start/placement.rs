//! The machines of the ranks, by `--ranks-on`.

use crate::flag::ranks_on::RanksOn;
use crate::node::client::{NodeOptions, NodePlace};
use crate::node::ray::RayOptions;
use crate::node::secret::{NodeSecret, SecretError};
use crate::setup::Setup;
use crate::worker::host::Placement;

/// The machines of the ranks. Each node has its share of them. A node that Ray chooses has a stage, because the ranks of a stage exchange most,
/// or one rank if there are no stages.
pub(crate) fn placement(setup: Setup<'_>) -> Result<Placement, SecretError> {
    let (args, num_ranks) = (setup.args(), setup.settings.num_ranks);
    let nodes: Vec<_> = match &args.ranks_on[..] {
        [] => return Ok(Placement::Here),
        [RanksOn::Ray(cluster)] => {
            let num_nodes = match args.pipeline_parallel_size {
                1 => num_ranks,
                num_stages => num_stages as usize,
            };
            return Ok(Placement::Ray(RayOptions {
                python: setup.python.to_owned(),
                cluster: cluster.clone(),
                num_nodes,
                ranks_per_node: num_ranks / num_nodes,
                uses_gpus: args.unencrypted_gpus,
            }));
        }
        hosts => hosts.iter().filter_map(RanksOn::node).collect(),
    };
    let num_nodes = nodes.len();
    let secret = NodeSecret::read(args.node_secret_file.as_deref().ok_or(SecretError::Missing)?)?;
    let node = |address| NodeOptions {
        place: NodePlace::fixed(address),
        secret: secret.clone(),
        by_ray: false,
        num_ranks: num_ranks / num_nodes,
        uses_gpus: args.unencrypted_gpus,
    };
    Ok(Placement::Nodes(nodes.into_iter().map(node).collect()))
}
