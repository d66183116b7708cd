// Browsers start no worker for a page opened as a file, and the search is one. There it runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.scope = new Promise((resolve) => {
        frame.onload = () => {
          const scope = frame.contentWindow
          const load = (address) =>
            new Promise((loaded, failed) => {
              const script = scope.document.createElement("script")
              Object.assign(script, { src: address, onload: loaded, onerror: failed })
              scope.document.body.append(script)
            })
          scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          scope.importScripts = (...addresses) =>
            addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve())
          load(new URL(url, document.baseURI).href).then(() => resolve(scope))
        }
      })
      document.documentElement.append(frame)
    }

    postMessage(data) {
      this.scope.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })))
    }

    set onmessage(listener) {
      this.addEventListener("message", listener)
    }
  }
}
