// Browsers start no web worker for a page that is opened from files, so there the search runs in a hidden frame. The
// theme looks for this name.
window.IFrameWorker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.inside = frame.contentWindow;
    this.send = this.inside.postMessage.bind(this.inside);
    this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    const script = this.inside.document.createElement("script");
    script.src = new URL(url, document.baseURI);
    // What is sent before the script has run would be lost.
    this.ready = new Promise((resolve) => (script.onload = resolve));
    this.inside.document.head.append(script);
  }

  postMessage(data) {
    this.ready.then(() => this.send(data, "*"));
  }
};

if (location.protocol === "file:") window.Worker = window.IFrameWorker;
