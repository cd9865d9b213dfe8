// Runs the unit tests under tests/ with node.
import { build } from "esbuild";
import { spawnSync } from "node:child_process";
import { mkdtemp, readdir, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";

const tests = join(import.meta.dirname, "tests");
const folder = await mkdtemp(join(tmpdir(), "playground-"));
try {
  await build({
    entryPoints: (await readdir(tests)).map((name) => join(tests, name)),
    outdir: folder,
    outExtension: { ".js": ".mjs" },
    bundle: true,
    platform: "node",
    format: "esm",
    jsx: "automatic",
    jsxImportSource: "preact",
    logLevel: "warning",
  });
  const built = (await readdir(folder)).map((name) => join(folder, name));
  process.exitCode = spawnSync(process.execPath, ["--test", ...built], { stdio: "inherit" }).status ?? 1;
} finally {
  await rm(folder, { recursive: true });
}
