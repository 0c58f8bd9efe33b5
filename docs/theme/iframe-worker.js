// A page opened from a folder may not start a worker. The search then runs in a hidden frame, which may load scripts.
// The theme's search looks for the name IFrameWorker.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.element = document.createElement("iframe");
      this.element.hidden = true;
      document.body.append(this.element);
      const inner = this.element.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inner.document.createElement("script");
      this.ready = new Promise((resolve) => { script.onload = resolve; });
      script.src = url;
      inner.document.body.append(script);
    }

    postMessage(data) {
      this.ready.then(() => this.element.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() { this.element.remove(); }
  };
}
