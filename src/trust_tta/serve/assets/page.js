"use strict";

const CURVES = ["time", "entropy", "confidence", "weight", "certainty", "agreement", "accuracy"];
const CHARTS = [
  { key: "accuracy", title: "accuracy", about: "of the last 100 predictions whose labels came back", top: 1, percent: true },
  { key: "entropy", title: "entropy", about: "of the predictions, in nats: how unsure the network is" },
  { key: "weight", title: "adapted share", about: "weight of the adapted network in what is served; the rest is the source's", top: 1, percent: true },
  { key: "certainty", title: "sure of harm", about: "how sure the guard's test is that adaptation harms", top: 1, percent: true },
];
const EVIDENCE = {
  evidence: "evidence of harm", weight: "adapted share", e_value: "e-value", agreement: "agreement", snapshot: "snapshot",
};
const MOST_CARDS = 12, MOST_POINTS = 480, SPAN = 240, MOST_EVENTS = 60;
const HEIGHT = 78, LEFT = 34, RIGHT = 4, BASE = 16; // pixels of a chart, beside and below it
const KINDS = { source_leads: "source leads", source_leads_over: "source no longer leads", few_classes_over: "many classes again" };
const SERVED = { source_leads: "source predicts", source_leads_over: "adapted network predicts" };
const DONE = { none: "noted", source: "back to the source", rollback: "rolled back", skip: "update undone", pause: "paused", resume: "resumed" };
const PAUSE = 1000, PATIENCE = 10000, OVERLAP = 2; // milliseconds between two requests, and for one; seconds of news asked for twice
const TINY = 1e-6; // what rounding leaves of a distance
const SERIOUS = new Set(["rollback", "source", "pause", "skip"]);

const streams = new Map();
let events = [], received = false, token = sessionStorage.getItem("token") || "", scale = null, latest = 0, since = 0;
const $ = (id) => document.getElementById(id);

// News

async function poll() {
  try {
    const response = await fetch(`live?since=${since}`, { signal: AbortSignal.timeout(PATIENCE) });
    if (!response.ok) throw new Error(response.statusText);
    update(await response.json());
    draw();
    connected(true);
  } catch (error) {
    connected(false);
  }
  setTimeout(poll, PAUSE);
}

function connected(on) {
  $("dot").className = on ? "on" : "off";
  $("connection").textContent = on ? "live" : "not connected; trying again";
}

function update(message) {
  received = true;
  since = message.now - OVERLAP;
  for (const [name, stream] of streams) {
    if (message.names.includes(name)) continue;
    stream.card?.remove();
    streams.delete(name);
  }
  for (const stream of message.streams) {
    const had = streams.get(stream.name), first = stream.points[0]?.[0] ?? Infinity;
    const points = (had?.points || []).filter((point) => point[0] < first);
    streams.set(stream.name, { ...stream, card: had?.card, points: [...points, ...stream.points].slice(-MOST_POINTS) });
  }
  latest = Math.max(0, ...message.streams.map((s) => s.points.at(-1)?.[0] || 0)) || latest;
  const known = new Set(events.map((event) => event.id));
  events = [...events, ...message.events.filter((event) => !known.has(event.id))].slice(-MOST_EVENTS);
}

// Drawing

function draw() {
  $("loading").hidden = received;
  $("empty").hidden = !received || streams.size > 0;
  const all = [...streams.values()].sort((a, b) => a.number - b.number), shown = all.slice(0, MOST_CARDS);
  const now = latest, start = Math.max(now - SPAN, Math.min(now - 10, ...all.map((s) => s.points[0]?.[0] || now)));
  const tops = Object.fromEntries(CHARTS.map((chart) => [chart.key, chart.top || highest(shown, chart, start)]));
  scale = { start, now, tops };
  for (const stream of shown) drawCard(stream);
  for (const stream of all.slice(MOST_CARDS)) stream.card = stream.card?.remove();
  $("more").hidden = all.length <= MOST_CARDS;
  $("more").textContent = `and ${all.length - MOST_CARDS} more; all of them are listed under streams, below`;
  drawEvents();
}

function highest(shown, chart, start) {
  const column = CURVES.indexOf(chart.key);
  let top = 0;
  for (const stream of shown) {
    for (const point of stream.points) if (point[0] >= start) top = Math.max(top, point[column] || 0);
  }
  return top > TINY ? 1.06 * top : 1;
}

function drawCard(stream) {
  if (!stream.card) makeCard(stream);
  const find = (query) => stream.card.querySelector(query);
  find(".counts").textContent = `${count(stream.images, "image")}, ${count(stream.batches, "batch", "batches")}`;
  find(".badges").replaceChildren(...badges(stream));
  find(".numbers").replaceChildren(...numbers(stream));
  find(".guard").textContent = guard(stream);
  for (const chart of CHARTS) drawChart(chart, stream, find(`[data-chart=${chart.key}]`));
  drawThumbnails(find(".shown"), stream.shown);
  const pause = find("[data-action=pause], [data-action=resume]");
  pause.dataset.action = pause.textContent = stream.paused ? "resume" : "pause";
}

function makeCard(stream) {
  const card = stream.card = $("card").content.firstElementChild.cloneNode(true);
  card.dataset.stream = stream.name;
  card.querySelector("h2").textContent = stream.name;
  for (const button of card.querySelectorAll("[data-action]")) {
    button.onclick = () => act(stream.name, button.dataset.action);
  }
  card.querySelector(".charts").replaceChildren(...CHARTS.map((chart) => makeChart(chart, stream.name)));
  $("streams").append(card);
}

function badges(stream) {
  const found = [stream.paused ? ["paused", ""] : stream.adapted ? ["adapting", "fine"] : ["not adapting", ""]];
  for (const alarm of stream.alarms) found.push([alarm.replaceAll("_", " "), "warn"]);
  if (stream.reading.leading_since) found.push(["source leads", "warn"]);
  return found.map(([text, tone]) => element("span", { class: `badge ${tone}` }, text));
}

function numbers(stream) {
  const reading = stream.reading;
  const found = [
    [percent(stream.accuracy), stream.labels ? `right, of ${count(Math.min(stream.labels, 100), "label")}` : "no labels yet"],
    [percent(reading.confidence), "confident"],
    [percent(reading.agreement), "like the source"],
  ];
  return found.map(([value, text]) => {
    const box = element("div", { class: "number" });
    box.append(element("b", {}, value), element("span", {}, text));
    return box;
  });
}

// How sure the guard is, what it serves and since when, what it costs, and what it did.
function guard(stream) {
  const { compared, certainty, weight, cost, leading_since: batch } = stream.reading;
  if (!compared) return "Guard: nothing compared with the source yet.";
  const own = events.filter((event) => event.stream === stream.name);
  const lead = own.findLast((event) => event.kind === "source_leads" && event.action === "none");
  const act = own.findLast((event) => event.kind !== "request" && SERIOUS.has(event.action));
  const share = weight > 0.995 ? "The adapted network predicts" : weight < 0.005 ? "The source predicts" : `Predictions are ${percent(weight)} the adapted network's, the rest the source's`;
  const since = batch ? `; the source has led since ${lead ? clock(lead.time) : `batch ${batch}`}` : "";
  const did = act ? `Last action: ${DONE[act.action]} at ${clock(act.time)}.` : "It has not intervened.";
  return `Guard: ${percent(certainty)} sure that adaptation harms. ${share}${since}. Comparing adds ${percent(Math.max(0, cost))} to the method's passes. ${did}`;
}

function makeChart(chart, name) {
  const figure = element("figure", { class: "chart", "data-chart": chart.key });
  const caption = element("figcaption", { title: chart.about });
  caption.append(element("span", {}, chart.title), element("b", {}));
  const picture = svg("svg", { role: "img", height: HEIGHT + BASE });
  picture.onpointermove = (event) => {
    figure.dataset.at = (event.clientX - picture.getBoundingClientRect().left).toFixed(0);
    drawChart(chart, streams.get(name), figure);
  };
  picture.onpointerleave = () => {
    delete figure.dataset.at;
    drawChart(chart, streams.get(name), figure);
  };
  figure.append(caption, picture);
  return figure;
}

function drawChart(chart, stream, figure) {
  const column = CURVES.indexOf(chart.key), { start, now } = scale, top = scale.tops[chart.key];
  const picture = figure.lastElementChild, width = Math.max(picture.clientWidth, 120), plot = width - LEFT - RIGHT;
  const x = (time) => LEFT + plot * (time - start) / (now - start);
  const y = (value) => 2 + (HEIGHT - 2) * (1 - Math.min(value / top, 1));
  const format = chart.percent ? percent : number;
  const points = stream.points.filter((point) => point[0] >= start && point[0] <= now && point[column] !== null);
  const at = figure.dataset.at === undefined ? null : start + (now - start) * (figure.dataset.at - LEFT) / plot;
  const chosen = at === null ? points.at(-1) : nearest(points, at);
  const value = chosen ? format(chosen[column]) : "–";
  const label = at === null || !chosen ? value : `${clock(chosen[0])}  ${value}`;
  figure.querySelector("b").textContent = label;
  const drawn = [...axes(top, format, x, y, width)];
  for (const event of events) {
    if (event.stream !== stream.name || event.kind === "request" || event.time < start || event.time > now) continue;
    const mark = line(event.kind === "alarm" ? "mark bad" : "mark", x(event.time), x(event.time), 2, HEIGHT);
    mark.append(svg("title", {}));
    mark.firstChild.textContent = `${clock(event.time)} ${kindOf(event)}${event.action === "none" ? "" : `: ${doneBy(event)}`}`;
    drawn.push(mark);
  }
  const path = points.map((point, i) => `${i ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[column]).toFixed(1)}`).join("");
  if (path) drawn.push(svg("path", { class: "curve", d: path }));
  if (chosen) drawn.push(svg("circle", { class: "last", cx: x(chosen[0]), cy: y(chosen[column]), r: 2.6 }));
  picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT + BASE}`);
  picture.setAttribute("aria-label", `${chart.title} ${chart.about}: ${value}`);
  picture.replaceChildren(...drawn);
}

function* axes(top, format, x, y, width) {
  for (const value of top === 1 ? [0, 0.5, 1] : [0, round(top / 2)]) {
    yield line(value ? "grid" : "frame", LEFT, width, y(value), y(value));
    yield text("tick end", LEFT - 5, y(value) + (value ? 3.5 : 0), value ? format(value) : "0");
  }
  const seconds = scale.now - scale.start;
  yield text("tick", LEFT, HEIGHT + BASE - 3, seconds >= 90 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds)} s ago`);
  yield text("tick end", width, HEIGHT + BASE - 3, "now");
}

function nearest(points, time) {
  return points.reduce((best, point) => Math.abs(point[0] - time) < Math.abs((best || point)[0] - time) ? point : best || point, null);
}

// Kept where they are the same, so that titles and selections stay.
function drawThumbnails(list, shown) {
  const had = new Map([...list.children].map((item) => [item.dataset.key, item]));
  list.replaceChildren(...shown.map((image) => had.get(`${image.id} ${image.right}`) || drawThumbnail(image)));
}

function drawThumbnail(image) {
  const tone = image.right === true ? "right" : image.right === false ? "wrong" : "";
  const verdict = { right: ", right", wrong: ", wrong" }[tone] || "";
  const item = element("li", { class: tone, title: `${image.label}, ${percent(image.confidence)}${verdict}`, "data-key": `${image.id} ${image.right}` });
  item.append(element("img", { src: image.src, alt: "" }), element("b", {}, image.label), percent(image.confidence));
  return item;
}

function drawEvents() {
  $("happened").hidden = events.length === 0;
  const rows = events.toReversed().map((event) => {
    const row = element("tr", {});
    const tone = { alarm: "bad", change: "", storage: "bad", request: "", start: "" }[event.kind] ?? "warn";
    const why = element("td", {}, event.reason);
    const proof = Object.entries(EVIDENCE).filter(([key]) => event.evidence[key] !== undefined && event.evidence[key] !== null);
    if (proof.length) why.append(element("small", {}, proof.map(([key, name]) => `${name} ${number(event.evidence[key])}`).join(" · ")));
    row.append(
      element("td", {}, clock(event.time)),
      element("td", {}, event.stream),
      element("td", { class: tone }, kindOf(event)),
      element("td", { class: SERIOUS.has(event.action) ? tone : "" }, event.kind === "start" ? "" : doneBy(event)),
      why,
    );
    return row;
  });
  $("events").replaceChildren(...rows);
}

// Actions

async function act(name, action) {
  const card = streams.get(name).card, reply = card.querySelector(".reply");
  if (!token && !(await ask())) return;
  reply.className = "reply";
  reply.textContent = "…";
  try {
    const path = `streams/${encodeURIComponent(name)}/${action}`;
    const response = await fetch(path, { method: "POST", headers: { Authorization: `Bearer ${token}` } });
    const answer = await response.json();
    if (response.status === 401 || response.status === 403) keep("");
    reply.className = response.ok ? "reply" : "reply bad";
    reply.textContent = response.ok ? DONE[answer.action] || answer.action : answer.error;
  } catch (error) {
    reply.className = "reply bad";
    reply.textContent = "the service does not answer";
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
    $("cancel").onclick = () => dialog.close("cancel");
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

const line = (tone, x1, x2, y1, y2) => svg("line", { class: tone, x1, x2, y1, y2 });

function text(tone, x, y, content) {
  const made = svg("text", { class: tone, x, y });
  made.textContent = content;
  return made;
}

const clock = (time) => new Date(1000 * time).toLocaleTimeString([], { hour12: false });
const doneBy = (event) => event.action === "none" && SERVED[event.kind] || DONE[event.action] || event.action;
const kindOf = (event) => KINDS[event.kind] || event.kind.replaceAll("_", " ");
const round = (value) => Number(value.toPrecision(1)); // a scale has round numbers
const percent = (value) => value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`;
const number = (value) => value === null || value === undefined ? "–" : Math.abs(value) < TINY ? "0" : value >= 100 || Number.isInteger(value) ? value.toFixed(0) : String(Number(value.toPrecision(2)));
const count = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : many || `${one}s`}`;

const hash = new URLSearchParams(location.hash.slice(1)).get("token");
if (hash) {
  keep(hash);
  history.replaceState(null, "", location.pathname);
}
$("example").textContent = `curl -F image=@photo.jpg ${location.origin}/predict`;
const theme = localStorage.getItem("theme");
if (theme) document.documentElement.dataset.theme = theme;
$("theme").onclick = () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  localStorage.setItem("theme", document.documentElement.dataset.theme = dark ? "light" : "dark");
};
addEventListener("resize", () => scale && draw());
poll();
