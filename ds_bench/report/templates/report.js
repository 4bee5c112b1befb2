"use strict";
(() => {
  const said = document.getElementById("said");

  const keyOf = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.key === undefined ? cell.textContent.trim().toLowerCase() : cell.dataset.key;
  };

  // A missing value comes last whichever way; equal rows keep the order they were run in.
  const compare = (a, b, descending, numeric) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const order = numeric ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true });
    return descending ? -order : order;
  };

  for (const table of document.querySelectorAll("table.results")) {
    const body = table.tBodies[0];
    const original = [...body.rows];
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      const button = heading.querySelector("button");
      if (!button) return;
      const numeric = !heading.classList.contains("words");
      button.addEventListener("click", () => {
        const descending = heading.getAttribute("aria-sort") === "ascending";
        headings.forEach((other) => other.hasAttribute("aria-sort") && other.setAttribute("aria-sort", "none"));
        heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const rows = [...original];
        rows.sort((a, b) => compare(keyOf(a, column), keyOf(b, column), descending, numeric));
        body.append(...rows);
        said.textContent = `Sorted by ${button.textContent}, ${descending ? "descending" : "ascending"}.`;
      });
    });
  }

  // Where a page has no clipboard of its own (an old browser, a policy), the old way by a selection.
  const copyBySelection = (text) => {
    const area = document.createElement("textarea");
    area.value = text;
    area.setAttribute("readonly", "");
    area.style.position = "fixed";
    area.style.opacity = "0";
    document.body.append(area);
    area.select();
    let done = false;
    try {
      done = document.execCommand("copy");
    } catch {
      done = false;
    }
    area.remove();
    return done;
  };

  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return copyBySelection(text);
    }
  };

  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      const source = document.getElementById(button.dataset.copies);
      const done = await copy(source.textContent);
      button.focus();
      if (!done) getSelection().selectAllChildren(source);
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      said.textContent = done ? "Copied." : "Could not copy: the text is selected, press Ctrl+C.";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }
})();
