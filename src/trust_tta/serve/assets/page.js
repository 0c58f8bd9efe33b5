"use strict";

const CURVES = ["time", "entropy", "confidence", "input_distance", "weight_distance", "agreement", "accuracy"];
const CHARTS = [
  { key: "accuracy", title: "accuracy, last 100 labels", top: 1, percent: true },
  { key: "entropy", title: "entropy of predictions" },
  { key: "input_distance", title: "drift of the images", limit: true },
  { key: "weight_distance", title: "distance of the weights" },
];
const MOST_CARDS = 12, MOST_POINTS = 480, SPAN = 240, MOST_EVENTS = 60;
const WIDTH = 300, HEIGHT = 72;
const SERIOUS = new Set(["rollback", "source", "pause", "skip"]);

const streams = new Map();
let events = [], token = sessionStorage.getItem("token") || "", fresh = true;
const $ = (id) => document.getElementById(id);

// What arrives

function listen() {
  const source = new EventSource("live");
  source.onopen = () => { fresh = true; connected(true); };
  source.onerror = () => connected(false);
  source.onmessage = (message) => { take(JSON.parse(message.data)); draw(); };
}

function connected(on) {
  $("dot").className = on ? "on" : "off";
  $("connection").textContent = on ? "live" : "not connected; trying again";
}

function take(news) {
  if (fresh) {
    for (const stream of streams.values()) stream.card?.remove();
    streams.clear();
    events = [];
    fresh = false;
  }
  for (const name of news.gone) {
    streams.get(name)?.card?.remove();
    streams.delete(name);
  }
  for (const told of news.streams) {
    const points = streams.get(told.name)?.points || [];
    const card = streams.get(told.name)?.card;
    streams.set(told.name, { ...told, card, points: [...points, ...told.points].slice(-MOST_POINTS) });
  }
  events = [...events, ...news.events].slice(-MOST_EVENTS);
}

// What is drawn

function draw() {
  $("empty").hidden = streams.size > 0;
  const all = [...streams.values()], shown = all.slice(0, MOST_CARDS);
  const now = Math.max(...all.map((s) => s.points.at(-1)?.[0] || 0));
  const start = Math.max(now - SPAN, Math.min(...all.map((s) => s.points[0]?.[0] || now)));
  const tops = Object.fromEntries(CHARTS.map((chart) => [chart.key, chart.top || highest(shown, chart, start)]));
  for (const stream of shown) drawCard(stream, start, now, tops);
  $("more").hidden = all.length <= MOST_CARDS;
  $("more").textContent = `and ${all.length - MOST_CARDS} more; all of them are listed under streams, below`;
  drawEvents();
}

function highest(shown, chart, start) {
  const column = CURVES.indexOf(chart.key);
  let top = 0;
  for (const stream of shown) {
    for (const point of stream.points) if (point[0] >= start) top = Math.max(top, point[column] || 0);
    if (chart.limit && stream.limit) top = Math.max(top, 1.2 * stream.limit);
  }
  return top ? 1.08 * top : 1;
}

function drawCard(stream, start, now, tops) {
  if (!stream.card) {
    stream.card = $("card").content.firstElementChild.cloneNode(true);
    stream.card.dataset.stream = stream.name;
    stream.card.querySelector("h2").textContent = stream.name;
    for (const button of stream.card.querySelectorAll("[data-action]")) {
      button.onclick = () => act(stream.name, button.dataset.action);
    }
    $("streams").append(stream.card);
  }
  const find = (query) => stream.card.querySelector(query);
  find(".counts").textContent = `${count(stream.images, "image")}, ${count(stream.batches, "batch", "batches")}`;
  find(".badges").replaceChildren(...badges(stream));
  find(".numbers").replaceChildren(...numbers(stream));
  find(".charts").replaceChildren(...CHARTS.map((chart) => drawChart(chart, stream, start, now, tops[chart.key])));
  find(".shown").replaceChildren(...stream.shown.map(drawShown));
  const pause = find("[data-action=pause], [data-action=resume]");
  pause.dataset.action = pause.textContent = stream.paused ? "resume" : "pause";
}

function badges(stream) {
  const found = [stream.paused ? ["paused", "bad"] : stream.adapted ? ["adapting", "fine"] : ["not adapting", ""]];
  for (const alarm of stream.alarms) found.push([alarm.replace("_", " "), "warn"]);
  return found.map(([text, tone]) => element("span", { class: `badge ${tone}` }, text));
}

function numbers(stream) {
  const reading = stream.reading;
  const found = [
    [stream.accuracy === null ? "–" : percent(stream.accuracy), `accuracy, ${count(stream.labels, "label")}`],
    [percent(reading.confidence), "confidence"],
    [percent(reading.agreement), "agree with source"],
    [number(reading.input_distance), "drift"],
  ];
  return found.map(([value, text]) => {
    const box = element("div", { class: "number" });
    box.append(element("b", {}, value), element("span", {}, text));
    return box;
  });
}

function drawChart(chart, stream, start, now, top) {
  const column = CURVES.indexOf(chart.key), span = Math.max(now - start, 10);
  const x = (time) => WIDTH * (1 - (now - time) / span), y = (value) => HEIGHT * (1 - Math.min(value / top, 1));
  const figure = element("figure", { class: "chart" });
  const last = stream.points.findLast((point) => point[column] !== null)?.[column];
  const shown = last === undefined ? "–" : chart.percent ? percent(last) : number(last);
  const caption = element("figcaption", {});
  caption.append(element("span", {}, chart.title), element("b", {}, shown));
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${chart.title}: ${shown}` });
  picture.append(svg("line", { class: "frame", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }));
  if (chart.limit && stream.limit) {
    picture.append(svg("line", { class: "limit", x1: 0, x2: WIDTH, y1: y(stream.limit), y2: y(stream.limit) }));
  }
  for (const event of events) {
    if (event.stream === stream.name && event.kind !== "request" && event.time >= start && event.time <= now) {
      const tone = event.kind === "collapse" ? "mark bad" : "mark";
      picture.append(svg("line", { class: tone, x1: x(event.time), x2: x(event.time), y1: 0, y2: HEIGHT }));
    }
  }
  let path = "", pen = "M";
  for (const point of stream.points) {
    if (point[0] < start) continue;
    if (point[column] === null) { pen = path ? pen : "M"; continue; }
    path += `${pen}${x(point[0]).toFixed(1)} ${y(point[column]).toFixed(1)}`;
    pen = "L";
  }
  if (path) picture.append(svg("path", { class: "curve", d: path }));
  figure.append(caption, picture);
  return figure;
}

function drawShown(image) {
  const tone = image.right === true ? "right" : image.right === false ? "wrong" : "";
  const item = element("li", { class: tone, title: `${image.label}, ${percent(image.confidence)}` });
  item.append(element("img", { src: image.src, alt: "" }), element("b", {}, image.label), percent(image.confidence));
  return item;
}

function drawEvents() {
  $("happened").hidden = events.length === 0;
  const rows = events.toReversed().map((event) => {
    const row = element("tr", {});
    const serious = event.kind === "collapse" || event.kind === "storage" ? "bad" : event.kind === "request" ? "" : "warn";
    const done = event.action === "none" ? "" : { source: "back to the source", rollback: "rolled back" }[event.action] || event.action;
    row.append(
      element("td", {}, new Date(1000 * event.time).toLocaleTimeString()),
      element("td", {}, event.stream),
      element("td", { class: serious }, event.kind.replace("_", " ")),
      element("td", { class: SERIOUS.has(event.action) && serious ? serious : "" }, done),
      element("td", {}, event.reason),
    );
    return row;
  });
  $("events").replaceChildren(...rows);
}

// What people do

async function act(name, action) {
  const card = streams.get(name).card, told = card.querySelector(".told");
  if (!token && !(await ask())) return;
  told.className = "told";
  told.textContent = "…";
  try {
    const path = `streams/${encodeURIComponent(name)}/${action}`;
    const response = await fetch(path, { method: "POST", headers: { Authorization: `Bearer ${token}` } });
    const answer = await response.json();
    if (response.status === 401 || response.status === 403) keep("");
    told.className = response.ok ? "told" : "told bad";
    told.textContent = response.ok ? { source: "back to the source" }[answer.action] || `done: ${answer.action}` : answer.error;
  } catch (error) {
    told.className = "told bad";
    told.textContent = "the service does not answer";
  }
}

function ask() {
  return new Promise((resolve) => {
    const dialog = $("ask");
    $("token").value = "";
    dialog.onclose = () => {
      if (dialog.returnValue === "ok" && $("token").value) keep($("token").value);
      resolve(Boolean(token));
    };
    dialog.returnValue = "";
    dialog.showModal();
  });
}

function keep(given) {
  token = given;
  if (given) sessionStorage.setItem("token", given); else sessionStorage.removeItem("token");
}

// Small things

function element(name, attributes, text) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const percent = (value) => value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`;
const number = (value) => value === null || value === undefined ? "–" : value >= 100 ? value.toFixed(0) : value.toPrecision(2);
const count = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : many || `${one}s`}`;

const hash = new URLSearchParams(location.hash.slice(1)).get("token");
if (hash) {
  keep(hash);
  history.replaceState(null, "", location.pathname);
}
$("example").textContent = `curl -F image=@photo.jpg ${location.origin}/predict`;
$("theme").onclick = () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
};
listen();
