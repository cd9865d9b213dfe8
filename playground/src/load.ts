// What the server is doing, from its metrics in Prometheus's text format.

export interface Load {
  numRunning: number;
  numQueued: number;
  queuedTokens: number;
  /** Tokens that the KV pool can hold. */
  kvTokens: number;
  /** The share of the KV pool's blocks that running sequences use, from 0 to 1. */
  kvUsed: number;
  /** The share of the KV pool's blocks that the prefix cache holds. */
  kvCached: number;
  /** The share of the looked-up tokens that the prefix cache had; undefined before the first look-up. */
  prefixHits: number | undefined;
  workerRestarts: number;
}

export function loadOf(metrics: string): Load {
  const values = new Map<string, number>();
  for (const line of metrics.split("\n")) {
    const [name, value] = line.split(" ");
    if (name && value && !name.startsWith("#")) values.set(name, Number(value));
  }
  const value = (name: string) => values.get(name) ?? 0;
  const share = (part: number, whole: number) => (whole > 0 ? part / whole : 0);
  const blocks = value("penstock_kv_blocks");
  const queried = value("penstock_prefix_queried_tokens");
  return {
    numRunning: value("tgi_batch_current_size"),
    numQueued: value("tgi_queue_size"),
    queuedTokens: value("penstock_queue_tokens"),
    kvTokens: value("tgi_batch_max_total_tokens"),
    kvUsed: share(blocks - value("penstock_kv_free_blocks"), blocks),
    kvCached: share(value("penstock_kv_cached_blocks"), blocks),
    prefixHits: queried > 0 ? value("penstock_prefix_hit_tokens") / queried : undefined,
    workerRestarts: value("penstock_worker_restarts"),
  };
}
