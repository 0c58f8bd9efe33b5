import * as ort from "./vendor/ort.wasm.min.mjs";
import { fit, readMetadata, softmax, toTensor } from "./model.js";

ort.env.wasm.wasmPaths = new URL("./vendor/", import.meta.url).href;
ort.env.wasm.numThreads = 1; // more need headers that a plain file server does not send
const SHOWN = 5;
const element = (id) => document.getElementById(id);
let network = null;

async function open(buffer, name) {
  const about = readMetadata(buffer);
  const session = await ort.InferenceSession.create(buffer, { executionProviders: ["wasm"] });
  const known = (key, fallback) => (about[key] ? JSON.parse(about[key]) : fallback);
  network = { session, classes: known("classes", []), preprocessing: known("preprocessing"), input: known("input") };
  const adapted = about.adapted_by ? `, adapted by ${about.adapted_by}` : "";
  element("network").textContent = `${name}: ${network.classes.length} classes${adapted}`;
  say("Drop a picture here, or click to choose one.");
}

async function predict(file) {
  if (!network) return say("There is no network yet: drop an .onnx file first.");
  const picture = await createImageBitmap(file);
  const { pixels, canvas } = fit(picture, network.preprocessing);
  const tensor = toTensor(ort, pixels, network.preprocessing.size, network.input);
  const begun = performance.now();
  const { logits } = await network.session.run({ images: tensor });
  show(softmax(logits.data), performance.now() - begun);
  const preview = element("preview");
  [preview.width, preview.height] = [canvas.width, canvas.height];
  preview.getContext("2d").drawImage(canvas, 0, 0);
}

function show(probabilities, milliseconds) {
  const ranked = probabilities.map((p, i) => [p, network.classes[i] ?? `class ${i}`]).sort((a, b) => b[0] - a[0]);
  element("result").replaceChildren(
    ...ranked.slice(0, SHOWN).map(([p, label]) => {
      const row = document.createElement("li");
      const bar = Object.assign(document.createElement("meter"), { value: p, max: 1 });
      row.append(Object.assign(document.createElement("span"), { textContent: label }), bar, `${(100 * p).toFixed(1)} %`);
      return row;
    }),
  );
  document.body.dataset.label = ranked[0][1];
  say(`${ranked[0][1]}, in ${milliseconds.toFixed(0)} ms on your own machine. Another one?`);
}

function say(text) {
  element("status").textContent = text;
}

async function take(file) {
  try {
    if (file.name.endsWith(".onnx")) await open(await file.arrayBuffer(), file.name);
    else await predict(file);
  } catch (error) {
    say(`${file.name} cannot be used: ${error.message}`);
  }
}

const area = element("drop");
area.addEventListener("dragover", (event) => event.preventDefault());
area.addEventListener("drop", (event) => {
  event.preventDefault();
  if (event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
});
element("file").addEventListener("change", (event) => event.target.files.length && take(event.target.files[0]));

const answer = await fetch("network.onnx");
if (answer.ok) await open(await answer.arrayBuffer(), "network.onnx");
else say("Drop an .onnx file here that `trust-tta export` wrote.");
document.body.dataset.ready = "yes";
