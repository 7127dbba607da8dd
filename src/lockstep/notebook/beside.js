// Links of the course, where `./lockstep lab` lets a page speak to JupyterLab (window.jupyterapp). Elsewhere they stay
// links, and JupyterLab opens an exercise over its chapter.
window.lockstepBeside ??= (() => {
  const wait = (ms) => new Promise((done) => { setTimeout(done, ms) });

  // A section, even if its chapter has to be opened first. JupyterLab draws cells one by one, from the first, and would
  // stay at the chapter's top: the section's cells are drawn before all others, and keep their place while these come,
  // for a minute at most, and not against the learner. Its cell is then the selected one, which Shift+Enter runs.
  const showSection = async (opened, place) => {
    const { content, node } = opened, cells = content.widgets;
    const isTitle = (line) => line[0] === "#" && line.replace(/^#+ |`/g, "").trim().replaceAll(" ", "-") === place;
    const has = (one) => one.model.type === "markdown" && one.model.sharedModel.getSource().split("\n").some(isTitle);
    const isMissing = (one) => !opened.isDisposed && one.isPlaceholder?.();
    const first = cells.findIndex(has);
    for (let at = Math.max(first, 0); at < first + 4 && at < cells.length; at++)
      if (isMissing(cells[at])) await content._updateForDeferMode?.(cells[at], at);
    const heading = () => node.querySelector(`[data-jupyter-id="${CSS.escape(place)}"]`);
    const panel = node.querySelector(".jp-WindowedPanel-outer");
    panel?.style.setProperty("overflow-anchor", "auto"); // also when the learner has taken over
    const grows = new ResizeObserver(() => { heading()?.scrollIntoView() });
    panel?.querySelectorAll(".jp-WindowedPanel-inner, .jp-WindowedPanel-viewport").forEach((part) => grows.observe(part));
    let ticks = 240, steady = 0;
    for (const kind of ["wheel", "pointerdown", "keydown"])
      node.addEventListener(kind, () => { ticks = 0; grows.disconnect() }, { once: true });
    while (ticks-- > 0 && (steady < 8 || cells.some(isMissing))) {
      const all = node.getBoundingClientRect(), title = heading();
      const top = title ? title.getBoundingClientRect().top - all.top : -1;
      steady = top >= 0 && top < all.height / 3 ? steady + 1 : 0;
      if (steady === 1) content.activeCellIndex = cells.findIndex((one) => one.node.contains(title));
      else if (!steady && title) title.scrollIntoView();
      else if (!steady) opened.setFragment(`#${encodeURIComponent(place)}`);
      await wait(250);
    }
    grows.disconnect();
    while (cells.some(isMissing)) await wait(250);
    panel?.style.removeProperty("overflow-anchor");
  };

  // An exercise's file beside the chapter, at the line that its link names; the link stays in view. In a narrow window
  // the file browser makes room for both.
  const showFile = async (app, path, line, link) => {
    const there = [...app.shell.widgets("main")].find((one) => one.context?.path?.startsWith("exercises/"));
    const options = there ? { mode: "tab-after", ref: there.id } : { mode: "split-right" };
    if (innerWidth < 1200) app.shell.collapseLeft?.();
    const opened = await app.commands.execute("docmanager:open", { path, options });
    await opened?.context?.ready;
    await wait(300);
    const editor = line && opened?.content?.editor, at = { line: line - 1, column: 0 };
    editor?.setCursorPosition?.(at);
    editor?.revealPosition?.(at);
    const view = editor?.editor, middle = view?.constructor.scrollIntoView; // CodeMirror's: with the lines around it
    if (middle) view.dispatch({ effects: middle(view.state.selection.main.head, { y: "center" }) });
    link.scrollIntoView({ block: "nearest" });
  };

  // A check reads the file: an exercise is saved when the learner goes from it to something else.
  window.jupyterapp?.shell.currentChanged?.connect((_, { oldValue: left }) => {
    const context = left?.context;
    if (context?.path.startsWith("exercises/") && context.model.dirty) context.save();
  });

  addEventListener("click", async (event) => {
    const { jupyterapp: app } = window, link = event.target.closest?.("a[href]"), to = app && link && new URL(link.href);
    const path = to && to.pathname.match(/\/files\/((?:exercises\/.+\.\w+)|(?:chapters\/.+\.ipynb))$/)?.[1];
    if (!path || (path.startsWith("chapters/") && !to.hash)) return;
    event.preventDefault();
    event.stopPropagation();
    const line = Number(to.hash.match(/^#L(\d+)$/)?.[1] ?? 0);
    if (!to.hash || line) return showFile(app, path, line, link);
    const opened = await app.commands.execute("docmanager:open", { path });
    await opened?.context?.ready;
    if (opened?.setFragment) await showSection(opened, decodeURIComponent(to.hash.slice(1)));
  }, true);
  return true;
})();
