"use strict";
(() => {
  const all = (query, root = document) => Array.from(root.querySelectorAll(query));
  const data = JSON.parse(document.getElementById("data").textContent);

  // Theme: the system's choice until the reader makes one.
  const root = document.documentElement;
  const remember = (value) => { try { localStorage.setItem("theme", value); } catch { /* a file may have no storage */ } };
  const recall = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (recall()) root.dataset.theme = recall();
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    remember(root.dataset.theme);
  });

  // Pictures: each is stored once, however often it is shown.
  for (const image of all("img[data-p]")) image.src = data.pictures[image.dataset.p];

  // Groups: one at a time.
  const menu = document.getElementById("group");
  const groups = all("section.group");
  const showGroup = () => groups.forEach((group, i) => { group.hidden = i !== Number(menu.value); });
  if (menu) { menu.addEventListener("change", showGroup); showGroup(); }

  // Panes: one at a time.
  for (const box of all(".choices")) {
    const panes = all(":scope > .pane", box);
    const show = (k) => panes.forEach((pane, i) => { pane.hidden = i !== k; });
    const buttons = all(":scope > .segments button", box);
    buttons.forEach((button, k) => button.addEventListener("click", () => {
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      show(k);
    }));
    const select = box.querySelector(":scope > .pick select");
    if (select) select.addEventListener("change", () => show(select.selectedIndex));
  }

  // Pickers hide methods (data-s) and domains (data-d) everywhere in their group.
  const apply = (group) => {
    for (const [kind, mark] of [["ms", "s"], ["md", "d"]]) {
      for (const chip of all(`.chip[data-${kind}]`, group)) {
        const off = chip.getAttribute("aria-pressed") === "false";
        for (const item of all(`[data-${mark}="${chip.dataset[kind]}"]`, group)) {
          if (!item.closest(".free")) item.style.display = off ? "none" : "";
        }
      }
    }
    for (const chart of all("svg.dots", group)) if (!chart.closest(".free")) closeGaps(chart);
    for (const table of all(".accuracy table", group)) recompute(table);
  };

  // Mean, worst and gains over the shown domains, computed from the runs.
  const percent = (x) => {  // half to even on the shortest decimal, as in Python
    const [digits, power] = Math.abs(x).toExponential().split("e");
    const number = BigInt(digits.replace(".", "")), places = (digits.split(".")[1] ?? "").length - Number(power) - 3;
    if (places <= 0) return `${x < 0 ? "-" : ""}${number * 10n ** BigInt(-places) / 10n}.${number * 10n ** BigInt(-places) % 10n}`;
    const unit = 10n ** BigInt(places), rest = number % unit;
    let tenths = number / unit;
    if (2n * rest > unit || (2n * rest === unit && tenths % 2n === 1n)) tenths += 1n;
    return `${x < 0 && tenths ? "-" : ""}${tenths / 10n}.${tenths % 10n}`;
  };
  const signed = (x) => (x > 0 && percent(x) !== "0.0" ? "+" : "") + percent(x);
  const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const deviation = (values) => Math.sqrt(average(values.map((value) => (value - average(values)) ** 2)) * values.length / (values.length - 1));
  const fill = (cell, text, value, spread) => {
    cell.textContent = text;
    if (value === null) delete cell.dataset.v; else cell.dataset.v = value;
    if (spread) { const small = document.createElement("small"); small.textContent = ` ± ${spread}`; cell.append(small); }
  };
  const shownMean = (row) => {
    const cells = Array.from(row.cells).filter((cell) => cell.dataset.d && cell.style.display !== "none");
    if (!cells.length || cells.some((cell) => cell.dataset.v === undefined)) return null;
    const seeds = {};
    for (const cell of cells) for (const run of runsOf(cell)) if (run.accuracy !== null) (seeds[run.seed] ??= []).push(run.accuracy);
    const whole = Object.values(seeds).every((values) => values.length === cells.length) ? Object.values(seeds).map(average) : [];
    const values = cells.map((cell) => Number(cell.dataset.v));
    return { mean: average(values), worst: Math.min(...values), spread: whole.length > 1 ? percent(deviation(whole)) : "" };
  };
  const recompute = (table) => {
    const heads = Array.from(table.tHead.rows[0].cells), rows = Array.from(table.tBodies[0].rows);
    if (!heads.some((head) => head.matches(".mean"))) return;
    const hidden = heads.some((head) => head.dataset.d && head.style.display === "none");
    const found = new Map(rows.map((row) => [row.dataset.s, shownMean(row)]));
    const best = (name) => {
      const texts = rows.filter((row) => found.get(row.dataset.s)).map((row) => found.get(row.dataset.s)[name]);
      return texts.length > 1 ? percent(Math.max(...texts)) : "";
    };
    heads.forEach((head, column) => {
      const kind = ["mean", "worst", "gain"].find((name) => head.classList.contains(name));
      if (!kind) return;
      for (const row of rows) {
        const cell = row.cells[column], mine = found.get(row.dataset.s), base = found.get(head.dataset.base);
        cell.dataset.whole ??= JSON.stringify([cell.innerHTML, cell.className, cell.dataset.v ?? null, cell.dataset.tip ?? null]);
        const [html, role, value, told] = JSON.parse(cell.dataset.whole);
        if (!hidden) {
          cell.innerHTML = html;  // escaped when the page was written
          cell.className = role;
          if (value === null) delete cell.dataset.v; else cell.dataset.v = value;
          if (told !== null) cell.dataset.tip = told;
          continue;
        }
        delete cell.dataset.tip;
        const number = !mine || (kind === "gain" && !base) ? null : kind === "gain" ? mine.mean - base.mean : mine[kind];
        const text = number === null ? "–" : kind === "gain" ? signed(number) : percent(number);
        fill(cell, text, number, kind === "mean" && mine ? mine.spread : "");
        cell.className = `${number === null ? "gap" : "num"} ${kind}${kind !== "gain" && text === best(kind) ? " best" : ""}`;
      }
    });
    const note = table.closest(".part").querySelector(".note.shown");
    const count = heads.filter((head) => head.dataset.d && head.style.display !== "none").length;
    note.hidden = !hidden;
    note.textContent = `Means, worst domains and gains are over the ${count} ${count === 1 ? "domain" : "domains"} shown here; the text, the other tables and the charts of means are over all domains.`;
  };
  const closeGaps = (chart) => {
    const rows = all("g.row", chart);
    const step = Number(chart.dataset.step), top = 8;
    let shown = 0;
    for (const row of rows) {
      if (row.style.display === "none") continue;
      row.setAttribute("transform", `translate(0 ${top + step * shown})`);
      shown += 1;
    }
    const lost = step * (rows.length - shown);
    const box = chart.getAttribute("viewBox").split(" ").map(Number);
    chart.setAttribute("viewBox", `${box[0]} ${box[1]} ${box[2]} ${step * shown + top + 42}`);
    const under = chart.querySelector("g.under");
    under.setAttribute("transform", `translate(0 ${-lost})`);
  };
  for (const group of groups) {
    for (const chip of all(".chip", group)) {
      chip.addEventListener("click", (event) => {
        const kind = "ms" in chip.dataset ? "ms" : "md";
        const family = all(`.chip[data-${kind}]`, group);
        if (event.shiftKey) family.forEach((other) => other.setAttribute("aria-pressed", String(other === chip)));
        else chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") === "false"));
        apply(group);
      });
    }
    for (const button of all(".all", group)) {
      button.addEventListener("click", () => {
        const family = all(`.chip[data-${button.dataset.all}]`, group);
        const on = family.some((chip) => chip.getAttribute("aria-pressed") === "false");
        family.forEach((chip) => chip.setAttribute("aria-pressed", String(on)));
        apply(group);
      });
    }
  }

  // The mean stays in view next to the method, however wide the table is.
  const stick = () => {
    for (const table of all(".accuracy table")) table.style.setProperty("--second", `${table.rows[0].cells[0].offsetWidth}px`);
  };
  addEventListener("resize", stick);
  if (menu) menu.addEventListener("change", stick);
  stick();

  // Tables: sort by a column; the first click puts the largest first.
  for (const table of all("figure.table table")) {
    const body = table.tBodies[0];
    const original = Array.from(body.rows);
    all(".sort", table).forEach((button, column) => button.addEventListener("click", () => {
      const head = button.closest("th");
      const before = head.getAttribute("aria-sort");
      all("th", table.tHead).forEach((th) => th.removeAttribute("aria-sort"));
      if (column === 0 || before === "ascending") { body.append(...original); return; }
      const sign = before === "descending" ? 1 : -1;
      head.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.v;
      body.append(...original.slice().sort((a, b) => {
        if (key(a) === undefined || key(b) === undefined) return (key(a) === undefined) - (key(b) === undefined);
        return sign * (Number(key(a)) - Number(key(b)));
      }));
    }));
  }

  // Tooltips of the nearest number or mark; arrow keys move through a table.
  const tip = document.getElementById("tip");
  const showTip = (text, box) => {
    tip.textContent = text;
    tip.hidden = false;
    const left = Math.min(Math.max(8, box.left + box.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 4 ? above : box.top + box.height + 8}px`;
  };
  const hideTip = () => { tip.hidden = true; };
  const tellCell = (cell) => {
    const runs = cell.dataset.r ? "\n" + runsOf(cell).map((run) => run.digest.slice(0, 8)).join(" ") : "";
    showTip(cell.dataset.tip + runs, cell.getBoundingClientRect());
  };
  const REACH = { mouse: 16, pen: 24, touch: 32 };  // pixels
  const nearest = (chart, x, y) => {
    let found = null;
    const take = (distance, text, box) => { if (!found || distance < found.distance) found = { distance, text, box }; };
    for (const mark of all("[data-tip]", chart)) {
      if (!mark.getClientRects().length) continue;
      if (mark.dataset.at) {
        const matrix = mark.getScreenCTM(), texts = mark.dataset.at.split(";");
        mark.getAttribute("d").split(/[ML]/).slice(1).forEach((pair, i) => {
          const [u, v] = pair.split(" ").map(Number);
          const point = new DOMPoint(u, v).matrixTransform(matrix);
          take(Math.hypot(x - point.x, y - point.y), `${mark.dataset.tip}: ${texts[i]}`, new DOMRect(point.x, point.y, 0, 0));
        });
      } else {
        const box = mark.getBoundingClientRect();
        const across = Math.max(box.left - x, 0, x - box.right), down = Math.max(box.top - y, 0, y - box.bottom);
        // Of overlapping marks, the one whose center is nearest.
        const middle = Math.hypot(x - box.left - box.width / 2, y - box.top - box.height / 2) / 1000;
        take(Math.hypot(across, down) + middle, mark.dataset.tip, box);
      }
    }
    return found;
  };
  const point = (event) => {
    const target = event.target instanceof Element ? event.target : null;
    const cell = target?.closest("td[data-tip]"), chart = target?.closest("svg.chart");
    if (cell) return tellCell(cell);
    const found = chart && nearest(chart, event.clientX, event.clientY);
    if (found && found.distance < (REACH[event.pointerType] ?? 16)) showTip(found.text, found.box); else hideTip();
  };
  for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, point);
  document.addEventListener("focusin", (event) => {
    const cell = event.target instanceof Element ? event.target.closest("td[data-tip]") : null;
    if (cell && cell.matches(":focus-visible")) tellCell(cell); else if (!cell) hideTip();
  });
  addEventListener("scroll", hideTip, { passive: true, capture: true });
  const sources = (cell) => cell.matches(".theirs, .gap:not([data-r])") ? "" : cell.dataset.r ?? cell.parentElement.dataset.r ?? "";
  const runsOf = (cell) => sources(cell).split(",").filter(Boolean).map((i) => {
    const run = Object.fromEntries(data.header.map((name, k) => [name, data.runs[i][k]]));
    run.options = data.options[run.options];
    return run;
  });
  for (const table of all("figure.table table")) {
    const first = table.querySelector("td");
    if (first) first.tabIndex = 0;
    table.addEventListener("keydown", (event) => {
      const cell = event.target.closest("td");
      if (!cell) return;
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); openTrace(cell); return; }
      if (event.key === "Escape") { hideTip(); return; }
      const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!steps) return;
      event.preventDefault();
      const visible = (item) => item.style.display !== "none";
      const rows = Array.from(table.tBodies[0].rows).filter(visible);
      const across = (row) => Array.from(row.cells).filter((item) => item.tagName === "TD" && visible(item));
      const row = rows[rows.indexOf(cell.parentElement) + steps[0]];
      const next = row && across(row)[across(cell.parentElement).indexOf(cell) + steps[1]];
      if (!next) return;
      all("td[tabindex]", table).forEach((old) => old.removeAttribute("tabindex"));
      next.tabIndex = 0;
      next.focus();
    });
  }

  // A click on a number shows its runs.
  const trace = document.getElementById("trace");
  const make = (name, text) => { const item = document.createElement(name); item.textContent = text; return item; };
  const openTrace = (cell) => {
    if (!sources(cell)) return;
    hideTip();
    const told = cell.dataset.tip ? cell.dataset.tip.split("\n")[0] : "";
    const heads = [cell.parentElement.cells[0], cell.closest("table").tHead.rows[0].cells[cell.cellIndex]];
    document.getElementById("trace-title").textContent = told || heads.map((head) => head.textContent).join(": ");
    document.getElementById("trace-body").replaceChildren(...runsOf(cell).map((run) => {
      const box = make("div", "");
      box.className = "run";
      box.append(make("code", run.digest));
      const list = make("dl", "");
      const shown = { ...run, ...data.environments[run.environment] };
      for (const [name, value] of Object.entries(shown)) {
        if (value === null || ["digest", "environment", "config"].includes(name)) continue;
        const pair = make("div", "");
        pair.append(make("dt", name), make("dd", String(value)));
        list.append(pair);
      }
      box.append(list);
      return box;
    }));
    trace.showModal();
  };
  document.addEventListener("click", (event) => {
    const cell = event.target instanceof Element ? event.target.closest("figure.table td") : null;
    if (cell) openTrace(cell);
  });
  trace.addEventListener("click", (event) => { if (event.target === trace) trace.close(); });

  // Save charts as SVG, and tables as CSV and LaTeX, as currently shown.
  const save = (name, kind, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "fill-opacity", "vector-effect",
    "font-size", "font-weight", "font-family", "text-anchor"];
  const svgText = (chart) => {
    const copy = chart.cloneNode(true);
    const sources = [chart, ...all("*", chart)], targets = [copy, ...all("*", copy)];
    sources.forEach((source, i) => {
      const style = getComputedStyle(source);
      for (const name of STYLES) targets[i].style.setProperty(name, style.getPropertyValue(name));
      if (source.style.display === "none") targets[i].setAttribute("display", "none");
      if (source.dataset.tip) {
        const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
        title.textContent = source.dataset.tip;
        targets[i].append(title);
      }
    });
    const box = chart.getAttribute("viewBox").split(" ");
    copy.setAttribute("width", box[2]);
    copy.setAttribute("height", box[3]);
    const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    ground.setAttribute("width", "100%");
    ground.setAttribute("height", "100%");
    ground.setAttribute("fill", getComputedStyle(chart.closest("figure")).backgroundColor);
    copy.prepend(ground);
    return new XMLSerializer().serializeToString(copy);
  };
  const grid = (table) => Array.from(table.rows).map((row) => Array.from(row.cells)
    .filter((cell) => cell.style.display !== "none" && row.style.display !== "none")).filter((row) => row.length);
  const spread = (cell) => cell.querySelector("small");
  const plain = (cell) => {
    const copy = cell.cloneNode(true);
    all("small", copy).forEach((item) => item.remove());
    return copy.textContent.trim();
  };
  // An apostrophe keeps a spreadsheet from taking text for a formula; numbers stay numbers.
  const inert = (text) => /^[=+\-@\t\r]/.test(text) && !/^[+-]?(\d+\.?\d*|\.\d+|inf|nan)$/.test(text) ? `'${text}` : text;
  const quoted = (text) => /[",\n\r]/.test(inert(text)) ? `"${inert(text).replaceAll('"', '""')}"` : inert(text);
  // Missing values are empty; standard deviations have their own columns.
  const csvText = (table) => {
    const rows = grid(table);
    const wide = rows[0].map((_, j) => rows.slice(1).some((row) => row[j] && spread(row[j])));
    const cells = (cell, j, head) => {
      const text = cell.classList.contains("gap") || plain(cell) === "–" ? "" : plain(cell).replace("†", "");
      if (!wide[j]) return [text];
      return [text, head ? `${text} std` : (spread(cell)?.textContent ?? "").replace("±", "").trim()];
    };
    return rows.map((row, i) => row.flatMap((cell, j) => cells(cell, j, i === 0)).map(quoted).join(",")).join("\n") + "\n";
  };
  const SPECIAL = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "–": "--", "±": "$\\pm$", "†": "\\textdagger{}" };
  const latex = (text) => text.replace(/[\\~^–±†&%$#_{}]/g, (c) => SPECIAL[c] || `\\${c}`);
  const texText = (table) => {
    const rows = grid(table).map((row) => row.map((cell) => {
      const text = latex(plain(cell));
      const around = spread(cell) && getComputedStyle(spread(cell)).display !== "none" ? ` ${latex(spread(cell).textContent.trim())}` : "";
      return (cell.classList.contains("best") ? `\\textbf{${text}}` : text) + around;
    }).join(" & ") + " \\\\");
    const columns = "l" + "r".repeat(Math.max(0, grid(table)[0].length - 1));
    return [`\\begin{tabular}{${columns}}`, "\\toprule", rows[0], "\\midrule", ...rows.slice(1), "\\bottomrule", "\\end{tabular}", ""].join("\n");
  };
  for (const button of all("[data-spread]")) {
    button.addEventListener("click", () => {
      const on = button.closest("figure").classList.toggle("spread");
      button.setAttribute("aria-pressed", String(on));
    });
  }
  for (const button of all("[data-save]")) {
    button.addEventListener("click", () => {
      const figure = button.closest("figure");
      const name = figure.dataset.name.replace(/[^\w.-]+/g, "_");
      const kind = button.dataset.save;
      if (kind === "svg") save(`${name}.svg`, "image/svg+xml", svgText(figure.querySelector("svg.chart")));
      if (kind === "csv") save(`${name}.csv`, "text/csv", csvText(figure.querySelector("table")));
      if (kind === "tex") save(`${name}.tex`, "application/x-tex", texText(figure.querySelector("table")));
    });
  }
})();
// Labels before and after the update: the handle divides them.
for (const input of document.querySelectorAll(".halves input")) {
  const cut = () => input.parentElement.style.setProperty("--cut", `${input.value}%`);
  input.addEventListener("input", cut);
  cut();
}
