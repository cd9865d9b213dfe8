// Builds the page's three files into router/src/http/playground/, or into the folder given as argument.
// The same sources and locked packages give the same bytes.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { mkdir, readFile, readdir, writeFile } from "node:fs/promises";
import { join } from "node:path";

const here = import.meta.dirname;
const into = process.argv[2] ?? join(here, "..", "router", "src", "http", "playground");
const names = ["page.js", "page.css"];

await mkdir(into, { recursive: true });
const { metafile } = await build({
  absWorkingDir: here,
  entryPoints: { page: "src/main.tsx" },
  outdir: into,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
  metafile: true,
  define: { "process.env.NODE_ENV": '"production"' },
  jsx: "automatic",
  jsxImportSource: "preact",
  logLevel: "warning",
});

// The licences of the packages in the script, at its beginning.
const packages = Object.keys(metafile.inputs).map((path) => path.match(/^node_modules\/((@[^/]+\/)?[^/]+)\//)?.[1]);
let notices = "";
for (const name of [...new Set(packages)].filter(Boolean).sort()) {
  const folder = join(here, "node_modules", name);
  const file = (await readdir(folder)).find((name) => /^licen[cs]e/i.test(name));
  notices += `\n${name}\n\n${(await readFile(join(folder, file), "utf8")).replaceAll("\r", "").trim()}\n`;
}
const script = join(into, "page.js");
await writeFile(script, `/*!${notices.replaceAll("*/", "* /")}*/\n${await readFile(script, "utf8")}`);

let page = await readFile(join(here, "src", "index.html"), "utf8");
for (const name of names) {
  const hash = createHash("sha256").update(await readFile(join(into, name))).digest("hex");
  page = page.replace(name, `${name}?${hash.slice(0, 16)}`);
}
await writeFile(join(into, "index.html"), page);
